"""The references of GPU tests, tested without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.epilogues import EPILOGUES, GROUPED, Problem
from support.reference import in_float64, relative_error


class Products(TorchDispatchMode):
    """Notes the dtypes of what matrix products give."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.endswith("mm"):
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize("name", EPILOGUES | GROUPED)
def test_no_product_of_a_reference_is_rounded(name: str) -> None:
    program = (EPILOGUES | GROUPED)[name]
    inputs = program.inputs(Problem(32, 32, 32))
    with Products() as products:
        in_float64(program, inputs)
    assert products.dtypes and set(products.dtypes) == {torch.float64}


def test_an_infinity_that_is_expected_is_no_error_and_another_is() -> None:
    expected = torch.tensor([3.0, -math.inf, 4.0])
    assert relative_error(torch.tensor([3.0, -math.inf, 4.5]), expected) == 0.1
    for wrong in (math.inf, 0.0, math.nan):
        assert not relative_error(torch.tensor([3.0, wrong, 4.0]), expected) < 1
