"""Pure functions of arrays: any number of leading batch axes, no parameters of their own."""

from .causal_conv import causal_conv1d as causal_conv1d, causal_conv1d_step as causal_conv1d_step
from .delta_net import gated_delta_net as gated_delta_net, gated_delta_net_step as gated_delta_net_step
from .delta_rule import (
    Residuals as Residuals,
    check_inputs as check_inputs,
    gated_delta_rule as gated_delta_rule,
    gated_delta_step as gated_delta_step,
)
from .gates import decay_and_beta as decay_and_beta
