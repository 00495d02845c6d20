"""The gated delta rule."""

from .inputs import check_inputs as check_inputs
from .op import gated_delta_rule as gated_delta_rule, gated_delta_step as gated_delta_step
from .residuals import Residuals as Residuals
