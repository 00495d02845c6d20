"""Text from a model: prefill of the prompts in one pass, then one token at a time from the states.

    for token in stream(model, prompt, max_new_tokens=100, sampler=Sampler(temperature=0.7), key=key):
        ...                                             # one token, as soon as it is there

`stream` is the loop, `generate` collects it into an array, `prefill` and `decode` are its two compiled parts for loops
of one's own, and `sample` picks a token from logits. Batches may be ragged: `pad_prompts` makes rows and mask of lists.
`save_state` and `load_state` keep what a model has read in a file.
"""

from ._files import load_state as load_state, save_state as save_state
from ._request import make_key as make_key, pad_prompts as pad_prompts
from ._sampling import GREEDY as GREEDY, NO_TOKEN as NO_TOKEN, Sampler as Sampler, keep as keep, sample as sample
from ._steps import decode as decode, prefill as prefill
from ._stream import Statistics as Statistics, Stream as Stream, generate as generate, stream as stream
