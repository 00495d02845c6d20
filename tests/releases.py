"""The released sizes, and how many tensors their files hold."""

from deltanox.models import QWEN3_5_SIZES, QWEN3_NEXT_80B_A3B

RELEASES = {**QWEN3_5_SIZES, "80B-A3B": QWEN3_NEXT_80B_A3B}
TENSORS = {
    "0.8B": 320,
    "2B": 320,
    "4B": 426,
    "9B": 427,
    "27B": 851,
    "35B-A3B": 693,
    "122B-A10B": 831,
    "397B-A17B": 1038,
}
