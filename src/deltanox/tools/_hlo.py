"""What a compiled program runs: its instructions and kernel calls, with trip counts, read off the HLO text."""

import dataclasses
import re
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([^ ]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^ ]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)")
_ALIASES = ("copy", "bitcast", "copy-start", "copy-done", "opt-barrier")


class Instruction(NamedTuple):
    name: str
    opcode: str
    operands: list[str]
    arguments: str
    attributes: str


class Computation(NamedTuple):
    name: str
    instructions: dict[str, Instruction]
    root: str


class KernelCall(NamedTuple):
    """A call of a Pallas kernel.

    - `name`: the kernel's. `label`: the instruction that libtpu schedules, the call or the fusion around it.
    - `code`: the kernel's code, by which equal calls are known. `runs`: how often it runs.
    """

    name: str
    label: str
    code: str
    runs: int


class Program(NamedTuple):
    """Kernel calls, how often each instruction outside of fusions runs, and what could not be counted, as sentences."""

    kernels: list[KernelCall]
    runs: dict[str, int]
    notes: frozenset[str]


def read_program(text: str) -> Program:
    """The program in the text of a compiled HLO module."""
    computations, entry = _parse(text)
    walk = _Walk(computations, [], {}, set())
    walk.visit(_Scope(computations[entry]), 1)
    return Program(walk.kernels, walk.runs, frozenset(walk.notes))


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    computations, entry = {}, ""
    instructions: dict[str, Instruction] | None = None
    name = root = ""
    for line in text.splitlines():
        if instructions is None:
            if match := _HEADER.match(line):
                name, instructions, root = match.group(2), {}, ""
                entry = name if match.group(1) else entry
        elif line.startswith("}"):
            computations[name], instructions = Computation(name, instructions, root), None
        elif match := _INSTRUCTION.match(line):
            instruction = _instruction(match.group(2), match.group(3))
            instructions[instruction.name] = instruction
            root = instruction.name if match.group(1) else root
    return computations, entry


def _instruction(name: str, rest: str) -> Instruction:
    match = _OPCODE.search(rest)
    if match is None:
        return Instruction(name, "", [], "", rest)
    depth, end = 1, match.end()
    while end < len(rest) and depth:
        depth += (rest[end] == "(") - (rest[end] == ")")
        end += 1
    arguments = rest[match.end() : end - 1]
    return Instruction(name, match.group(1), _NAME.findall(arguments), arguments, rest[end:])


@dataclasses.dataclass
class _Scope:
    """A computation that runs; the body of a loop knows where its carry comes from."""

    computation: Computation
    parent: "_Scope | None" = None
    carry: list[str] = dataclasses.field(default_factory=list)

    def __getitem__(self, name: str) -> Instruction | None:
        return self.computation.instructions.get(name)

    def element(self, name: str) -> int | None:
        """Which element of the carry this is, if it is one."""
        instruction = self._origin(name)
        if instruction is None or instruction.opcode != "get-tuple-element":
            return None
        source = self[instruction.operands[0]]
        index = re.search(r"index=(\d+)", instruction.attributes)
        return int(index.group(1)) if source and source.opcode == "parameter" and index else None

    def _origin(self, name: str) -> Instruction | None:
        instruction = self[name]
        while instruction is not None and instruction.opcode in _ALIASES and instruction.operands:
            instruction = self[instruction.operands[0]]
        return instruction

    def value(self, name: str) -> int | None:
        """The integer that an instruction always gives, None if that is not plain to see."""
        instruction = self._origin(name)
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None
        index = self.element(instruction.name)
        if index is None or self.parent is None or index >= len(self.carry) or not self._constant(index):
            return None
        return self.parent.value(self.carry[index])

    def _constant(self, index: int) -> bool:
        """Whether a turn of the loop hands this element on as it is."""
        root = self[self.computation.root]
        return bool(root) and root.opcode == "tuple" and self.element(root.operands[index]) == index


@dataclasses.dataclass
class _Walk:
    computations: dict[str, Computation]
    kernels: list[KernelCall]
    runs: dict[str, int]
    notes: set[str]

    def visit(self, scope: _Scope, times: int, fusion: str = "") -> None:
        for instruction in scope.computation.instructions.values():
            if not fusion:
                self.runs[instruction.name] = self.runs.get(instruction.name, 0) + times
            if instruction.opcode == "while":
                self._loop(scope, instruction, times)
            elif instruction.opcode == "custom-call":
                if 'custom_call_target="tpu_custom_call"' in instruction.attributes:
                    self._kernel(instruction, fusion, times)
            elif instruction.opcode in ("fusion", "call", "conditional", "async-start"):
                inside = fusion or (instruction.name if instruction.opcode == "fusion" else "")
                called = _CALLED.findall(instruction.attributes.partition("backend_config=")[0])
                bodies = [name for names in called for name in _NAME.findall(names)]
                before = len(self.kernels)
                for name in bodies:
                    self.visit(_Scope(self.computations[name]), times, inside)
                if instruction.opcode == "conditional" and len(self.kernels) > before:
                    self.notes.add("kernels in the branches of a condition are counted as if every branch ran")

    def _loop(self, scope: _Scope, loop: Instruction, times: int) -> None:
        condition, body = (re.findall(key + r"=%([\w.\-]+)", loop.attributes)[0] for key in ("condition", "body"))
        initial = scope[loop.operands[0]]
        carry = initial.operands if initial is not None and initial.opcode == "tuple" else []
        inner = _Scope(self.computations[body], scope, carry)
        test = _Scope(self.computations[condition])
        trips = _trips(scope, inner, test)
        before = len(self.kernels)
        self.visit(inner, times * (1 if trips is None else trips))
        if trips is None and len(self.kernels) > before:
            self.notes.add("kernels in a loop whose trip count is not in the compiled program are counted once")

    def _kernel(self, call: Instruction, fusion: str, times: int) -> None:
        body = re.search(r'"body":"([^"]*)"', call.attributes)
        self.kernels.append(
            KernelCall(_kernel_name(call), fusion or call.name, body.group(1) if body else call.name, times)
        )


def _trips(scope: _Scope, body: _Scope, test: _Scope) -> int | None:
    """Turns of a loop that counts up to a limit, from three constants: start, step and limit."""
    compare = test[test.computation.root]
    if compare is None or compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter = test.element(compare.operands[0])
    limit = test.value(compare.operands[1])
    if limit is None and (index := test.element(compare.operands[1])) is not None and index < len(body.carry):
        # the limit travels in the carry
        limit = scope.value(body.carry[index]) if body._constant(index) else None
    root = body[body.computation.root]
    if counter is None or limit is None or counter >= len(body.carry) or root is None or root.opcode != "tuple":
        return None
    start, add = scope.value(body.carry[counter]), body._origin(root.operands[counter])
    if start is None or add is None or add.opcode != "add":
        return None
    steps = [body.value(name) for name in add.operands if body.element(name) != counter]
    if len(steps) != 1 or not steps[0] or steps[0] < 0:
        return None
    return max(0, -(-(limit - start) // steps[0]))


def _kernel_name(call: Instruction) -> str:
    """The kernel's name, without the transformations around it; a kernel without one has its scope's."""
    match = re.search(r'op_name="([^"]*)"', call.attributes)
    parts = match.group(1).split("/") if match else []
    if len(parts) < 2 or parts[-1] != "pallas_call":
        return re.sub(r"\.\d+$", "", call.name)
    name = parts[-2]
    while inner := re.fullmatch(r"\w+\((.*)\)", name):
        name = inner.group(1)
    return name
