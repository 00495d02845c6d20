"""Pure functions of arrays: any number of leading batch axes, no parameters of their own."""

from .delta_rule import (
    Residuals as Residuals,
    check_inputs as check_inputs,
    gated_delta_rule as gated_delta_rule,
    gated_delta_step as gated_delta_step,
)
