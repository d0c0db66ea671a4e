"""Settings for one compilation: options of `torch.compile`, and of a pass."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import cute_backend
from cute_backend import UsageError, config, epilogue_pass
from cute_backend.backend import cute
from cute_backend.fx_walk.epilogue_pass import tuning_is_on

BF16 = torch.bfloat16


def two_results(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, weight).relu()
    return y, y * 2


def two_gradients(x: Tensor, weight: Tensor) -> Tensor:
    """The product of the backward graph has a sum after it, and a plane."""
    return F.linear(x.tanh(), weight)


def inputs(rows: int = 32) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, 32, dtype=BF16), torch.ones(32, 32, dtype=BF16)


def by_options(fn: Callable[..., Any], **settings: Any) -> Any:
    options = {f"cute_backend.{name}": value for name, value in settings.items()}
    return torch.compile(fn, backend=cute, dynamic=False, options=options)


def by_pass(fn: Callable[..., Any], **settings: Any) -> Any:
    options = {"post_grad_custom_pre_pass": epilogue_pass.with_settings(**settings)}
    return torch.compile(fn, backend="inductor", dynamic=False, options=options)


def both(fn: Callable[..., Any], **settings: Any) -> Any:
    """A pass with settings that the backend finds among its options."""
    options = {"post_grad_custom_pre_pass": epilogue_pass.with_settings(**settings)}
    return torch.compile(fn, backend=cute, dynamic=False, options=options)


WAYS = pytest.mark.parametrize("compiled", [by_options, by_pass, both])


def counted() -> dict[str, int]:
    return dict(counters["cute_backend"])


@pytest.mark.sweep(1)
@WAYS
def test_settings_hold_for_one_compilation_and_each_of_its_recompilations(
    compiled: Callable[..., Any], fresh_compiler: None
) -> None:
    fn = compiled(two_results, max_stores=1)
    fn(*inputs())
    assert counted() == {"anchors": 1, "regions": 1, "too_many_stores": 1}
    fn(*inputs(48))
    assert counted() == {"anchors": 2, "regions": 2, "too_many_stores": 2}
    torch._dynamo.reset()
    compiled(two_results)(*inputs())
    assert counted() == {"anchors": 3, "regions": 3, "too_many_stores": 2}
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    torch._dynamo.reset()
    compiled(two_results, max_stores=1)(*inputs())
    assert counters["inductor"]["fxgraph_cache_hit"] == 1


@pytest.mark.sweep(1)
@WAYS
def test_settings_hold_for_the_backward_graph_that_is_compiled_later(
    compiled: Callable[..., Any], fresh_compiler: None
) -> None:
    x, weight = inputs()
    x.requires_grad_()
    result = compiled(two_gradients, max_exact_loads=0)(x, weight)
    assert (counted()["anchors"], counted().get("too_many_loads")) == (1, None)
    result.sum().backward()
    assert (counted()["anchors"], counted().get("too_many_loads")) == (2, 1)
    assert config.max_exact_loads is None


def test_an_option_wins_over_a_pass_and_both_over_the_program(fresh_compiler: None) -> None:
    options = {
        "post_grad_custom_pre_pass": epilogue_pass.with_settings(max_stores=1, max_loads=0),
        "cute_backend.max-stores": 2,
    }
    with config.patch(max_stores=0, max_loads=3):
        torch.compile(two_results, backend=cute, options=options)(*inputs())
    assert counted() == {"anchors": 1, "regions": 1}


def test_options_stand_beside_inductors(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def find(*args: Any) -> tuple[list[Any], list[Any]]:
        seen.append((tuning_is_on(), inductor_config.emulate_precision_casts))
        return [], []

    monkeypatch.setattr("cute_backend.fx_walk.epilogue_pass.find_regions", find)
    options = {"cute_backend.max_autotune": True, "emulate_precision_casts": True}
    torch.compile(two_results, backend="cute", options=options)(*inputs())
    assert seen == [(True, True)]


def test_a_pass_with_settings_is_a_value() -> None:
    tuned = epilogue_pass.with_settings(max_autotune=True)
    assert tuned == epilogue_pass.with_settings(max_autotune=True) != epilogue_pass
    assert hash(tuned) == hash(epilogue_pass.with_settings(max_autotune=True))
    assert tuned.with_settings(max_stores=2).settings == {"max_autotune": True, "max_stores": 2}
    with config.patch(max_autotune=True):
        assert tuned.uuid() == epilogue_pass.uuid()
    assert tuned.uuid() != epilogue_pass.uuid()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mode": "fastest"}, r"Unrecognized mode=fastest, should be one of: default, .*max-autotune"),
    (
        {"options": {"max_autotun": True}},
        r"torch.compile's option 'max_autotun' is neither one of Inductor's "
        r"\(did you mean 'max_autotune'\?\) nor one of cute_backend's, which begin with 'cute_backend.'",
    ),
    ({"options": {"max_autotune": 1}}, r"Unexpected type of attr max_autotune, got int should be bool"),
    (
        {"options": {"cute_backend.max_store": 1}},
        r"cute_backend has no setting 'max_store' \(did you mean 'max_stores'\?\); it has max_loads, .*",
    ),
    (
        {"options": {"cute_backend.max_stores": True}},
        r"cute_backend's setting max_stores is True; it takes a whole number that is not negative or None",
    ),
    (
        {"options": {"cute_backend.max_autotune": "yes"}},
        r"cute_backend's setting max_autotune is 'yes'; it takes True or False or None",
    ),
]


@pytest.mark.parametrize(("how", "sentence"), WRONG)
def test_what_is_wrong_fails_at_the_first_call_before_anything_is_compiled(
    how: dict[str, Any], sentence: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_fx(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    compiled = torch.compile(two_results, backend="cute", **how)
    with pytest.raises(UsageError) as raised:
        compiled(*inputs())
    (line,) = str(raised.value).split("\n\n")[0].splitlines()
    assert re.fullmatch(sentence, line)
    assert not counted()
    frames = traceback.extract_tb(raised.tb)
    assert Path(frames[-1].filename).name == "backend.py"
    others = {Path(frame.filename).name for frame in frames[:-1]}
    assert others <= {"test_walk_settings.py", "eval_frame.py", "contextlib.py"}, "frames of Dynamo are shown"


def test_a_pass_takes_no_setting_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"^cute_backend has no setting 'tiles'.*; it has max_loads"):
        cute_backend.epilogue_pass.with_settings(tiles=3)
