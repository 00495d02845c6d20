"""The loop over new tokens, for the reader one token at a time."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from ..models import HybridLM, HybridState
from ._request import Request, check_request
from ._sampling import GREEDY, NO_TOKEN, Sampler
from ._speculative import Speculative
from ._steps import Plain


@dataclasses.dataclass
class Statistics:
    """What a stream did up to the last token that it handed out, and at most a step beyond. Sums over the rows that
    were not done.

    - `steps`: passes of the model over one row, prompts left out.
    - `drafted`, `accepted`: drafts that were checked, and those that became text.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accepted_per_step(self) -> float:
        """Drafts that became text, a pass; NaN before the first. A pass gives one token more than that."""
        return self.accepted / self.steps if self.steps else float("nan")


class Stream(Iterator[np.ndarray]):
    """The tokens of `stream`, one for each row at a time, and the `statistics` of their making."""

    def __init__(self, model: HybridLM, request: Request):
        self.statistics = Statistics()
        self._tokens = _run((Speculative if request.drafts else Plain)(model, request), request, self.statistics)

    def __next__(self) -> Int[np.ndarray, "*B"]:
        return next(self._tokens)


def _run(engine: Plain | Speculative, request: Request, statistics: Statistics) -> Iterator[np.ndarray]:
    most = request.max_new_tokens
    texts: list[list[int]] = [[] for _ in request.tokens]
    done = np.zeros(len(texts), bool)
    pending, handed_out = engine.first(), 0
    while True:
        # Dispatched before the tokens of the step before are read, unless those are sure to be the last
        more = any(len(text) + 1 < most for text, over in zip(texts, done) if not over)
        following = engine.step(done.copy()) if more else None
        drawn = np.asarray(pending[0]).reshape(len(texts), -1)
        counts = np.ones(len(texts), int) if pending[1] is None else np.asarray(pending[1])
        for row in np.flatnonzero(~done):
            used = 0
            for token in map(int, drawn[row, : counts[row]]):
                if token == NO_TOKEN:
                    raise FloatingPointError(
                        f"stream: the logits of row {row} are NaN at new token {len(texts[row])}: the weights hold NaN "
                        "or infinity, or overflow in the compute dtype; try Precision(compute='float32')"
                    )
                texts[row].append(token)
                used += 1
                done[row] = token in request.stop_tokens or len(texts[row]) == most
                if done[row]:
                    break
            if handed_out:
                statistics.steps += 1
                statistics.drafted += request.drafts
                statistics.accepted += min(used, int(counts[row]) - 1)
        ready = max(map(len, texts)) if done.all() else min(len(t) for t, over in zip(texts, done) if not over)
        for i in range(handed_out, ready):
            column = np.array([text[i] if i < len(text) else NO_TOKEN for text in texts], np.int32)
            yield column if request.batched else column.reshape(())
        handed_out = ready
        if done.all():
            return
        assert following is not None  # a row that isn't done had more to come
        pending = following


def stream(
    model: HybridLM,
    prompt: Int[Array | np.ndarray, "*B T"] | Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    stop_tokens: Sequence[int] = (),
    mask: Bool[Array | np.ndarray, "*B T"] | None = None,
    capacity: int | None = None,
    state: HybridState | None = None,
    drafts: int = 0,
    key: PRNGKeyArray | None = None,
) -> Stream:
    """Generate, one token a row at a time.

    The arguments are checked at the call, before anything is compiled; then each step is one dispatch of one compiled
    function. The next step is dispatched before a token is handed out, so the device isn't kept waiting by the reader.

    **Arguments:**

    - `model`: weights as they are to compute with (`Precision.cast_compute`). On a CPU `model.unstack()` is faster.
    - `prompt`: tokens [T], or [B T] for a batch; ragged ones with `mask` (see `pad_prompts`).
    - `max_new_tokens`: at most so many.
    - `sampler`: how tokens are drawn; greedy by default.
    - `stop_tokens`: a row ends with the first of these that it draws; it yields -1 from then on, and generation ends
      with the last row.
    - `mask`: False at padding, left or right.
    - `capacity`: slots of the attention caches; by default what is needed, rounded up to a multiple of 64. Prompts of
      different lengths with one capacity share one compiled step.
    - `state`: what `prefill` or `load_state` returned, with the batch in front (of 1 for a prompt [T]): the prompt goes
      on from there. It stays good for other prompts.
    - `drafts`: tokens that the model's multi-token prediction head drafts a step, which one pass of the model checks.
      The text is that of `drafts=0`, but for roundings: a token is drawn as ever, and a draft only saves a pass where
      it is the token drawn. `Stream.statistics` says how many were. Whether that is faster depends on the model and
      the device.
    - `key`: for sampling. The tokens are a function of key, prompt and model; a row's don't depend on the rows beside
      it.

    **Returns:** an iterator of int32 arrays: [] for a prompt [T], [B] for a batch.

    **Raises:** `ValueError` for a prompt that is empty or holds ids outside the vocabulary, a mask or a state that
    doesn't fit, a capacity that is too small, a missing key, or drafts of a model without the head;
    `FloatingPointError` where the logits are NaN.
    """
    request = check_request(
        model, prompt, mask, max_new_tokens, capacity, sampler, stop_tokens, state, drafts, key
    )  # fmt: skip
    return Stream(model, request)


def generate(
    model: HybridLM,
    prompt: Int[Array | np.ndarray, "*B T"] | Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    stop_tokens: Sequence[int] = (),
    mask: Bool[Array | np.ndarray, "*B T"] | None = None,
    capacity: int | None = None,
    state: HybridState | None = None,
    drafts: int = 0,
    key: PRNGKeyArray | None = None,
) -> Int[np.ndarray, "*B new"]:
    """All new tokens of `stream`, which has the same arguments, as one array: at most `max_new_tokens` long, -1 after
    a row's stop token."""
    tokens = stream(
        model, prompt, max_new_tokens=max_new_tokens, sampler=sampler, stop_tokens=stop_tokens, mask=mask,
        capacity=capacity, state=state, drafts=drafts, key=key,
    )  # fmt: skip
    return np.stack(list(tokens), axis=-1)
