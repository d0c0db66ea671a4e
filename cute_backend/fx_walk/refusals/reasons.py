"""Why something was not fused: one enum for every refusal, each with the sentence that the user reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx

from cute_backend.fx_walk.graph.mutation import root

LABEL = "cute_backend_label"
"""The entry of a placeholder's meta with the user's name for it."""

NO_PRODUCT = (
    "there is no matrix product in it: no mm, addmm, bmm, baddbmm, _int_mm, _scaled_mm, grouped_mm or "
    "_scaled_grouped_mm"
)
"""The reason for a program in which nothing is fused and nothing is refused."""


_COSTS_NOTHING = True


class Reason(Enum):
    """A refusal. The value is its name in the counters; `sentence` is filled with the facts of the case.

    `costs_nothing` is whether a kernel without the refusal would be no faster than what Inductor runs.
    """

    sentence: str
    costs_nothing: bool

    def __new__(cls, key: str, sentence: str, costs_nothing: bool = False) -> Reason:
        member = object.__new__(cls)
        member._value_ = key
        member.sentence = sentence
        member.costs_nothing = costs_nothing
        return member

    # Where the graph runs.
    CPP_WRAPPER = "cpp_wrapper", "Inductor's C++ wrapper can't pass an op the text of its spec"
    DEVICE = "device", "the product runs on {device}; only products on cpu and cuda are fused"
    CAPABILITY = "capability", "{device} has compute capability {capability}, not {taken}"

    INTERNAL_ERROR = "internal_error", "{failed} failed at {where} with {error}; {instead}"

    # The matrix product.
    NOTHING_TO_FUSE = (
        "nothing_to_fuse",
        "no op that could be fused follows the product{refused}",
        _COSTS_NOTHING,
    )
    UNSHARED = "unshared", "no op that could be fused follows the product, and it {why}"
    MATRIX_VECTOR = (
        "matrix_vector",
        "it is part of {target} with M, N or K of 1, which Inductor computes as a multiply and, unless K is "
        "1, a sum, in one kernel with the ops around them",
        _COSTS_NOTHING,
    )
    GROUPED = (
        "grouped",
        "{target} {why}",
    )
    INT32_RANGE = (
        "int32_range",
        "K is {k}, and sums of more than {most} products of int8 may leave int32",
    )
    OPAQUE_PRODUCT = (
        "opaque_product",
        "{target} multiplies matrices by code of its own, and the graph does not show what it computes; "
        "supported: mm, addmm, bmm, baddbmm, _int_mm, _scaled_mm, grouped_mm and _scaled_grouped_mm{instead}",
    )
    LEFT_TO_ASYNC_TP = (
        "left_to_async_tp",
        "the product is left to async tensor parallelism: {target} multiplies while data moves between GPUs, "
        "which no kernel here does",
    )
    OPERAND_DTYPE = "operand_dtype", "{where} do not multiply {a} by {b}; supported: {taken}"
    ADDEND_DTYPE = (
        "addend_dtype",
        "{target} adds {operand}, which is {dtype}, to a product of {multiplied}; torch takes {taken}, and "
        "raises an error for other dtypes",
    )
    OPERAND_LAYOUT = "operand_layout", "{operand} has strides {strides}; {accepted}"
    OPERAND_ALIGNMENT = (
        "operand_alignment",
        "{operand} has a stride of {bytes} bytes; kernels read operands whose strides are multiples of 16 "
        "bytes, here of {elements} elements",
    )
    OPERAND_DEVICE = "operand_device", "{operand} is on {device} and the product on {anchor}"
    APART = (
        "apart",
        "{reader} reads it and is computed in the kernel of {other}, and one kernel can't compute both "
        "products, because {why}",
    )
    EMPTY = "empty", "the product is empty: M, N, K = {m}, {n}, {k}", _COSTS_NOTHING
    RECIPE = "recipe", "the scales follow the recipe {recipe}; supported: {taken}"
    MIXED_SCALES = (
        "mixed_scales",
        "scale_a {scale_a} and scale_b {scale_b} are neither both one element nor ({m}, 1) and (1, {n}), nor "
        "of blocks of 128: ({m} or {row_blocks}, {k_blocks}) and ({k_blocks}, {n} or {column_blocks})",
    )
    WEIGHT_GROUPS = (
        "weight_groups",
        "{weight} is converted in groups of {values} of K, {k} in all, by scales and zeros of shape {given}; "
        "a kernel that converts a weight itself takes {taken}, so another one writes it in 16 bits at each "
        "call",
    )
    WEIGHT_STEPS = (
        "weight_steps",
        "{step} is {op} between {weight} and the product, so another kernel writes the weight in 16 bits at "
        "each call; a kernel that converts it itself takes one tensor of scales, of one element or for each "
        "column or group of K, before those of groups one of zeros, and transpositions before or after "
        "these, each step with one reader",
    )
    SCALE_LAYOUT = (
        "scale_layout",
        "{operand} is {dtype} of shape {shape} with strides {strides}; {recipe} takes {taken}",
    )
    SCALE_DTYPE = (
        "scale_dtype",
        "{operand} is {dtype}; scales of tensors, of rows and of blocks of 128 are float32",
    )
    SCALE_RESULT = "scale_result", "scale_result is given, which no kernel applies"
    OUT_DTYPE = (
        "out_dtype",
        "the product's own result would be {dtype}; kernels write bf16, fp16, fp32 and fp8, and can cast the "
        "result to other dtypes",
    )
    SYMBOLIC_SCALAR = "symbolic_scalar", "{value} is a number that is known only at run time"

    # Reasons of work after a product.
    NOT_POINTWISE = "not_pointwise", "{target} is neither a pointwise op nor a reduction that kernels compute"
    UNSUPPORTED_OP = "unsupported_op", "{target} is pointwise but {why}"
    REARRANGED = (
        "rearranged",
        "{target} gives the (M, N) plane the shape {shape}, which {how}",
    )
    UNPAIRED = (
        "unpaired",
        "{target} takes a part of the product's columns; a kernel divides them into two halves or, unless it "
        "converts its weight, into the even and the odd columns, if one op combines both, and writes even "
        "and odd columns together only in bf16 or fp16; it divides them into two to four parts that share a "
        "launch if together these are all columns, no op combines two of them, and ops that could not follow "
        "the whole product follow one",
    )
    HALVES_TOGETHER = (
        "halves_together",
        "{target} reduces two halves of a product together, but the kernel has a separate plane for each",
    )
    PART_OF_ROWS = (
        "part_of_rows",
        "{target} takes a part of the product's rows, and a kernel computes all of them, because {why}",
    )
    REDUCTION = (
        "reduction",
        "{target} is a reduction that kernels do not compute; they compute sum, mean, prod, amax, amin, max, "
        "min, any, argmax, argmin and logsumexp",
    )
    BATCHED = (
        "batched",
        "{target} reduces rows of several products together; kernels reduce only the last axis of a batched "
        "or grouped product, and only the first axis if its columns are in groups",
    )
    REDUCED_AXES = (
        "reduced_axes",
        "{target} reduces the axes {axes} of the shape {shape}; a kernel reduces all columns, all rows, or "
        "both, the rows of each batch if they are a multiple of 32 and the result is no index, or the "
        "columns of a block by sum, mean, amax, amin, any, var or logsumexp",
    )
    BLOCK_SIZE = (
        "block_size",
        "it reduces blocks of {columns} columns, which no tile holds whole; supported block sizes: {held}",
    )
    BLOCK_COST = (
        "block_cost",
        "it reduces blocks of columns of a single product, which costs the product's kernel more than a "
        "separate kernel if a visit has to hold a block whole, or if there are few rows and blocks of more "
        "than 192 columns; config.block_reductions = 'always' allows it",
        _COSTS_NOTHING,
    )
    ROTATION_SIZE = (
        "rotation_size",
        "it rotates the halves of blocks of {columns} columns, and the blocks of the region have {sizes} "
        "columns; a kernel rotates blocks of one size, which divides those of all others; supported sizes: "
        "{held}",
    )
    ROTATED_PART = (
        "rotated_part",
        "it rotates the halves of columns {part}; a kernel rotates {columns} columns if their number divides "
        "that of the block, and they begin at a multiple of it",
    )
    PART_OPERAND = (
        "part_operand",
        "{operand} varies along columns {part} of each block; a kernel can read it if all blocks share it, "
        "the size of this part divides that of the block, and the part begins at a multiple of its size",
    )
    REDUCED_PART = (
        "reduced_part",
        "{target} reduces columns {part} of each block; a kernel reduces whole blocks",
    )
    ROTATION_COST = (
        "rotation_cost",
        "it rotates blocks of columns, but {why}; config.rotary_embeddings = 'always' fuses it",
        _COSTS_NOTHING,
    )
    ROTATED_PLACES = (
        "rotated_places",
        "rows or columns are reduced, but a kernel that rotates blocks of {columns} columns keeps the "
        "columns in another order",
    )
    FEEDBACK = (
        "feedback",
        "{into} reads {reduction}, which reduces the region's own result and is complete only when the "
        "kernel has ended",
    )
    PLANE = "plane", "the result has shape {shape}, which is not the kernel's ({m}, {n}) plane"
    OUTPUT_LAYOUT = (
        "output_layout",
        "the result has strides {strides}, but a kernel writes dense row-major or column-major planes or, on "
        "Hopper and data center Blackwell, (B, H, S, D) with a multiple of 32 for D, if S is a number, B is "
        "1, or the result is computed from an operand that all batches or all positions share",
    )
    CACHE = (
        "cache",
        "{target} writes the result to rows of {cache}, but {why}; Inductor copies these rows",
    )
    LEFT_TO_USERS = (
        "left_to_users",
        "it is read by {users}, outside the kernel; computing it there reads and writes fewer bytes in total",
        _COSTS_NOTHING,
    )
    UNSEARCHED = (
        "unsearched",
        "the region could end with any of {count} values, too many to search for the cheapest end; "
        "it stores as many of them as it can, the last ones first, and this one is computed outside",
    )
    UNSUPPORTED_DTYPE = (
        "unsupported_dtype",
        "{operand} is {dtype}; epilogues support float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, "
        "int8, uint8, int32 and bool",
    )
    FP8 = "fp8", "{target} has no conversions of {dtype}, which the epilogue needs"
    FLOAT64 = "float64", "{operand} is float64, but an epilogue computes in fp32"
    CYCLE = (
        "cycle",
        "{operand} depends on the region's own result through {between}, which is not part of the kernel, so "
        "each would have to wait for the other",
    )
    MUTATION = (
        "mutation",
        "{mutation} writes in place between the product and this op, and the two can't be reordered",
    )
    TOO_MANY_OPERANDS = "too_many_operands", "the region would read {count} operands; a kernel takes {limit}"
    TOO_MANY_LOADS = (
        "too_many_loads",
        "the region would read {count} planes; a kernel reads {limit}, or more if one element of each plane "
        "that it reads or writes takes at most {held} bits in all (here {bits}); results of {bytes} bytes "
        "are left to other kernels",
    )
    TOO_MANY_STORES = (
        "too_many_stores",
        "the region would write {count} results; a kernel writes at most {limit}, and at most {planes} of "
        "them are planes; results of {bytes} bytes are left to other kernels",
    )

    UNFUSED_FASTER = (
        "unfused_faster",
        "{unfused} us were measured for Inductor's own code and {fused} us for the best of our kernels",
        _COSTS_NOTHING,
    )

    # Operands of work after a product.
    LOAD_DEVICE = "load_device", "{operand} is on {device} and the product on {anchor}"
    LOAD_LAYOUT = "load_layout", "{operand} is not a strided tensor"
    SIZE_UNPROVEN = (
        "size_unproven",
        "{operand} has size {size} where the plane has {plane}, and nothing proves that they are equal",
    )
    STRIDE_UNKNOWN = "stride_unknown", "{operand} has stride {stride}, and nothing shows whether it is zero"
    BLOCKS = (
        "blocks",
        "{operand} varies over the axes {sizes} of the columns with strides {strides}; a kernel reads blocks "
        "of a known size, with one stride from block to block and one within",
    )
    MUTATED_LOAD = (
        "mutated_load",
        "{operand} shares memory with what {mutation} writes in place before the kernel",
    )


@dataclass(frozen=True)
class Rejection:
    """A node that was not fused: its name in the graph, the reason, the sentence, and the program's line.

    `where` is the result of `nearest_line`. `is_backward` is whether the node is in the graph of the
    gradients. `costs_nothing` is that of the reason, but false for a product whose users were refused.
    """

    node: str
    reason: Reason
    message: str
    where: str = ""
    is_backward: bool = False
    costs_nothing: bool = False


def of_one_kernel(rejections: Iterable[Rejection]) -> list[str]:
    """The messages for a caller that needs one kernel for everything, each once. `left_to_users` is omitted:
    for such a caller nothing runs outside the kernel, so this refusal only follows from another one."""
    kept = (each.message for each in rejections if each.reason is not Reason.LEFT_TO_USERS)
    return list(dict.fromkeys(kept))


class Refused(Exception):
    """Raised inside the walker for a node that can't be fused. It becomes a Rejection, never an error.

    A fact that is a node has its name in the program, or in the graph if the program gives it none.
    """

    def __init__(self, reason: Reason, **facts: Any) -> None:
        self.reason = reason
        self.facts: dict[str, Any] = {
            key: program_name(of) if isinstance(of, fx.Node) else of for key, of in facts.items()
        }
        self.message = reason.sentence.format(**self.facts)
        self.costs_nothing = reason.costs_nothing and not facts.get("refused")
        super().__init__(self.message)

    def rejection(self, node: fx.Node) -> Rejection:
        where = nearest_line(node)
        return Rejection(node.name, self.reason, self.message, where, costs_nothing=self.costs_nothing)


_FRAME = re.compile(r'File "(.+)", line (\d+).*\n?(.*)')
_ASSIGNMENT = re.compile(r"\s*([\w.]+)\s*(?::[^=]+)?=(?!=)")
_NOT_THE_PROGRAM = (Path(torch.__file__).parent, Path(__file__).parents[2])
"""Folders whose frames are not the program's: torch's, and this package's, which calls what it explains."""
_ROOT_MODULE = re.compile(r"^L\['\w+'\]")


@lru_cache(maxsize=1024)
def is_of_program(path: str) -> bool:
    """Whether a file is neither torch's nor this package's."""
    return not any(folder in Path(path).parents for folder in _NOT_THE_PROGRAM)


def program_line(node: fx.Node) -> str:
    """The line that a node comes from, as "file.py:12": the innermost one outside torch and this package.

    If there is none, as in a model that consists of torch's own modules, the result is the path of the node's
    module, as "self.0". It is empty if that is unknown too.
    """
    return _program_frame(node)[0]


_NEAR = 16
"""Nodes that are searched for one with a line."""


def nearest_line(node: fx.Node) -> str:
    """The line of a node, as `program_line` gives it, or that of the nearest node that has one.

    Nodes that it reads are searched before those that read it. The result is empty if no near node has a
    line.
    """
    for neighbours in (attrgetter("all_input_nodes"), attrgetter("users")):
        seen, level = {node}, [node]
        while level and len(seen) < _NEAR:
            for each in level:
                if line := program_line(each):
                    return line
            level = [each for each in dict.fromkeys(chain(*map(neighbours, level))) if each not in seen]
            seen.update(level)
    return ""


def user_label(node: fx.Node) -> str:
    """The user's name for an operand, or for the tensor that it views."""
    return node.meta.get(LABEL) or program_name(root(node))


def program_name(node: fx.Node) -> str:
    """The name of a value for a reader: the label of an input or, as "scale (file.py:12)", the variable that
    the value is assigned to.

    A value inside an expression has its name in the graph. The line is omitted if it is unknown.
    """
    if LABEL in node.meta:
        return str(node.meta[LABEL])
    where, code = _program_frame(node)
    assigned = _ASSIGNMENT.match(code)
    inner = any(program_line(user) == where for user in node.users)
    name = assigned[1] if assigned is not None and not inner else node.name
    return f"{name} ({where})" if where else name


@lru_cache(maxsize=1024)
def _innermost(stack_trace: str) -> tuple[str, str] | None:
    """The innermost line of the program in a stack trace, and its code, or None."""
    for path, line, code in reversed(_FRAME.findall(stack_trace)):
        if is_of_program(path):
            return f"{Path(path).name}:{line}", code
    return None


def _program_frame(node: fx.Node) -> tuple[str, str]:
    """The line that a node comes from, as `program_line` gives it, and the code of the line."""
    if frame := _innermost(node.meta.get("stack_trace") or ""):
        return frame
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    modules = [path for path, _ in stack.values()]
    return (_ROOT_MODULE.sub("self", modules[-1]), "") if modules else ("", "")
