"""torch's async tensor parallelism: its pass runs before regions are searched.

With `torch._inductor.config._micro_pipeline_tp`, a pass of Inductor replaces an all-gather and the products
that read it, or a product and the reduce-scatter that reads it, by one op that moves data while it
multiplies. It recognises products of aten alone, and it runs after this package's pass. So it is called here
first, and products that it leaves are fused. Inductor calls it again later, and finds what was left then.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.pattern_matcher import stable_topological_sort

from cute_backend.fx_walk.graph.new_calls import call, evaluate
from cute_backend.fx_walk.graph.static import arguments, fake, product, same_sizes, target_name, tensor_of
from cute_backend.fx_walk.graph.working_copy import WorkingCopy
from cute_backend.fx_walk.refusals.containment import contain
from cute_backend.fx_walk.refusals.reasons import Rejection
from cute_backend.fx_walk.values.lower import is_reshape

aten = torch.ops.aten

LEFT_OUT = "products are fused before async tensor parallelism, which then recognises fewer of them"

_PRODUCTS = ("aten.mm.default", "aten._scaled_mm.default")
"""The products that torch's pass recognises."""


def is_on() -> bool:
    """Whether Inductor's setting for async tensor parallelism is on."""
    return bool(getattr(inductor_config, "_micro_pipeline_tp", False))


def multiply_while_moving(graph: fx.Graph) -> list[Rejection]:
    """Runs torch's pass on a graph if its setting is on. If that fails, the graph stays unchanged, and the
    failure is counted and returned."""
    if not is_on():
        return []
    copy = WorkingCopy(graph)
    try:
        # A private name, which other versions of torch may not have.
        from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

        _gather_matrices(copy.graph)
        before = set(copy.graph.nodes)
        micro_pipeline_tp_pass(copy.graph)
        made = [node for node in copy.graph.nodes if node not in before]
        stable_topological_sort(copy.graph)
        _evaluate(copy.graph, made)
        copy.graph.lint()
    except Exception as error:
        return [contain(error, LEFT_OUT)]
    if made:
        copy.commit()
    return []


def _evaluate(graph: fx.Graph, made: list[fx.Node]) -> None:
    """Gives new nodes their values, which torch's pass leaves to a later step."""
    like = next(value for node in graph.nodes if (value := tensor_of(node)) is not None)
    wanted = set(made)
    for node in graph.nodes:
        if node in wanted:
            evaluate(node, like)


def _gather_matrices(graph: fx.Graph) -> None:
    """Gathers each shard that products read as a matrix as one.

    An all-gather along the first axis that is followed by reshapes is the same in any shape. torch's pass
    looks through a single reshape. But if there is one sequence, whose shards are gathered along its second
    axis, there are two: from (ranks, S / ranks, K) to (1, S, K), and to (S, K).
    """
    c10d = torch.ops._c10d_functional
    for wait in graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        gather = wait.args[0]
        if target_name(gather) != "_c10d_functional.all_gather_into_tensor.default" or len(gather.users) > 1:
            continue
        columns = fake(wait).shape[-1]
        whole = [product(fake(wait).shape[:-1]), columns]
        views = list(_views(wait))
        matrices = [view for view in views if same_sizes(fake(view).shape, whole)]
        others = [user for user in wait.users if target_name(user) != "aten.reshape.default"]
        if others or not isinstance(columns, int) or not any(map(_is_multiplied, matrices)):
            continue
        with graph.inserting_before(gather):
            shard, *group = arguments(gather).values()
            shard = call(graph, gather, aten.reshape.default, shard, [-1, columns])
            gathered = call(graph, gather, gather.target, shard, *group)
            matrix = call(graph, wait, wait.target, gathered)
        for view in matrices:
            view.replace_all_uses_with(matrix)
        wait.replace_all_uses_with(matrix)
        for node in (*reversed(views), wait, gather):
            if not node.users:
                graph.erase_node(node)


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """The results of reshapes of a value, each after the one that it is a reshape of."""
    for user in node.users:
        if is_reshape(user) and user.args[0] is node:
            yield user
            yield from _views(user)


def _is_multiplied(node: fx.Node) -> bool:
    """Whether a product that torch's pass recognises reads a value as its A."""
    return any(user.args[0] is node and target_name(user) in _PRODUCTS for user in node.users)
