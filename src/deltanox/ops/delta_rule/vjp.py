"""Placeholder until the chunked engine lands in this session."""

from .reference import reference


def xla(q, k, v, g, beta, initial_state, boundary, mask, *, scale, l2norm_eps, chunk_size, precision, state_dtype, residuals):
    return reference(q, k, v, g, beta, initial_state, boundary, mask, scale=scale, l2norm_eps=l2norm_eps)
