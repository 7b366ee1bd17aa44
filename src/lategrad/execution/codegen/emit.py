"""Translate a function of vectors and scalars into C loops.

A rule's update is traced once. The trace is short: elementwise arithmetic on vectors, arithmetic on scalars, and sums
over a vector. :func:`emit` turns it into C that runs on vectors cut into any number of tensors: their addresses and
sizes are data, not code. One call alternates between two kinds of stage:

- *scalars* of level p: everything that depends on p sums taken one after another;
- *loop* p: a loop over all entries that takes the sums of level p + 1; the last loop also writes all vector results.

Elementwise values are computed again in every loop that needs them: arithmetic is cheaper than memory. The same text
is compiled for the CPU (OpenMP) and for NVIDIA GPUs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lategrad.execution.backend import UnsupportedError
from lategrad.execution.codegen import ops
from lategrad.execution.codegen.ops import MEMORY_TYPES, VALUE_TYPES

_aten = torch.ops.aten

CHUNK = 8192  # entries that one thread (CPU) or one block of threads (GPU) handles at a time

THREADS = 256  # threads of a block on a GPU; each takes four entries at a time


@dataclass
class Loop:
    """One loop over the entries of all vectors."""

    level: int  # number of sums taken one after another before it can run
    sums: list[Node]
    writes: list[tuple[int, Node]]  # the operands that it writes, and the values
    values: list[Node]  # what is computed for every entry, in order
    reads: list[int]  # the vector operands that it reads
    scalars: list[Node]

    @property
    def operands(self) -> list[int]:
        return list(dict.fromkeys([*self.reads, *(operand for operand, _ in self.writes)]))


@dataclass
class Source:
    """C code and the memory that a call needs; the first argument of the function ``run`` is a stage."""

    cpu: str  # stage -1 is all of them
    cuda: str
    stages: list[int | None]  # in order: the number of sums of a loop, with a GPU's block for each chunk; None: scalars
    operands: int
    scalars: int  # eight-byte slots for scalars that later stages read
    sums: int  # the largest number of sums that one loop takes


class _Emitter:
    """Turns a traced graph into loops. Operand i < number of inputs is input i; results may have operands beyond."""

    def __init__(self, graph: GraphModule, size: int, targets: Sequence[int], dtypes: Sequence[torch.dtype]):
        graph.graph.eliminate_dead_code()
        self.graph, self.size, self.dtypes = graph, size, dtypes
        *self.nodes, output = graph.graph.nodes
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.level: dict[Node, int] = {}
        for node in self.nodes:
            below = max((self.level[used] for used in node.all_input_nodes), default=0)
            self.level[node] = below + 1 if self.is_sum(node) else below
        self.slots = {node: i for i, node in enumerate(n for n in self.nodes if self.is_scalar(n))}
        unchanged = dict(enumerate(self.inputs))
        self.results = [(operand, node) for operand, node in zip(targets, output.args[0], strict=True)
                        if self.value(node).numel() and unchanged.get(operand) is not node]  # fmt: skip
        self.loops = self.plan_loops()
        self.loop_at = {loop.level: (i, loop) for i, loop in enumerate(self.loops)}
        self.levels = range(max(self.level.values()) + 1)  # scalars may be ready after the last loop

    # ---- What kind of value a node is

    def value(self, node: Node) -> Tensor:
        value = getattr(self.graph, str(node.target)) if node.op == "get_attr" else node.meta["val"]
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"{node.target} gives {type(value).__name__}")
        return value

    def is_vector(self, node: Node) -> bool:
        if (shape := tuple(self.value(node).shape)) == (self.size,):
            return True
        if math.prod(shape) > 1:
            raise UnsupportedError(f"{node.target} has shape {shape}")
        return False

    def is_scalar(self, node: Node) -> bool:
        return not self.is_vector(node) and self.value(node).numel() == 1

    def is_norm(self, node: Node) -> bool:
        return node.target is _aten.linalg_vector_norm.default and node.args[1:2] in ((), (2,))

    def is_sum(self, node: Node) -> bool:
        if node.op != "call_function" or not self.is_scalar(node) or not any(map(self.is_vector, node.all_input_nodes)):
            return False
        if not (self.is_norm(node) or node.target in (_aten.sum.dim_IntList, _aten.mean.dim)):
            raise UnsupportedError(f"{node.target} of a vector")
        return True

    def dtype(self, node: Node) -> torch.dtype:
        if (dtype := self.value(node).dtype) not in MEMORY_TYPES:
            raise UnsupportedError(f"{node.target} has dtype {dtype}")
        return dtype

    def type(self, node: Node) -> str:
        return VALUE_TYPES[self.dtype(node)]

    # ---- Expressions

    def name(self, node: Node) -> str:
        return f"v{self.index[node]}"

    def saved(self, node: Node) -> str:
        """The slot that holds a scalar between stages."""
        return f"*({self.type(node)}*)(saved + {self.slots[node]})"

    def define(self, node: Node, value: str) -> str:
        return f"const {self.type(node)} {self.name(node)} = {value};"

    def argument(self, value: Any, ctype: str) -> str:
        if isinstance(value, Node):
            return self.name(value) if self.type(value) == ctype else f"({ctype}){self.name(value)}"
        if isinstance(value, bool | int | float):
            return f"({ctype})({ops.literal(value)})"
        raise UnsupportedError(f"argument {value!r}")

    def expression(self, node: Node) -> str:
        target, args, ctype = node.target, node.args, self.type(node)
        if node.op == "get_attr":
            return self.argument(self.value(node).item(), ctype)
        half = self.dtype(node) in (torch.bfloat16, torch.float16)
        if half and (target is not _aten._to_copy.default or self.dtype(node) not in self.dtypes):
            raise UnsupportedError(f"{target} in {self.dtype(node)}")  # it would have to be rounded
        if target in ops.IDENTITY:
            return self.argument(args[0], ctype)
        if target in ops.CONSTANT:
            constant = ops.CONSTANT[target]
            return self.argument(args[constant] if isinstance(constant, int) else constant, ctype)
        if node.kwargs.get("alpha", 1) != 1:
            raise UnsupportedError(f"{target} with alpha")
        if target in ops.ARITHMETIC:
            return ops.ARITHMETIC[target].format(*(self.argument(a, ctype) for a in args))
        if target in ops.LOGIC:
            common = self.common_type(args)
            return ops.LOGIC[target].format(*(self.argument(a, common) for a in args))
        if target is _aten.where.self:
            return f"{self.argument(args[0], 'bool')} ? " + " : ".join(self.argument(a, ctype) for a in args[1:])
        if target is _aten.clamp.default:
            value = self.argument(args[0], ctype)
            for sign, bound in zip("<>", args[1:], strict=False):
                if bound is not None:
                    limit = self.argument(bound, ctype)
                    value = f"({value} {sign} {limit} ? {limit} : {value})"
            return value
        if target is _aten.pow.Tensor_Scalar:
            base, exponent = (self.argument(a, ctype) for a in args)
            simple: dict[Any, str] = {0: "1", 1: base, 2: f"{base} * {base}", 0.5: f"sqrt({base})", -1: f"1 / {base}"}
            return simple.get(args[1]) or f"pow({base}, {exponent})"
        raise UnsupportedError(str(target))

    def common_type(self, args: Sequence[Any]) -> str:
        dtypes = [self.dtype(a) for a in args if isinstance(a, Node)]
        dtype = torch.promote_types(dtypes[0], dtypes[-1])
        if not dtype.is_floating_point and any(isinstance(a, float) for a in args):
            raise UnsupportedError(f"a comparison of {args}")
        return VALUE_TYPES[dtype]

    # ---- Stages

    def plan_loops(self) -> list[Loop]:
        sums = [node for node in self.nodes if self.is_sum(node)]
        results = [(operand, node) for operand, node in self.results if self.is_vector(node)]
        # Vectors are written last: no sum may read an entry that was overwritten.
        last = max([self.level[node] for _, node in results] + [self.level[node] - 1 for node in sums], default=-1)
        planned = []
        for level in range(last + 1):
            here = [node for node in sums if self.level[node] == level + 1]
            if here or level == last:
                planned.append(self.loop(level, here, results if level == last else []))
        return planned

    def loop(self, level: int, sums: list[Node], writes: list[tuple[int, Node]]) -> Loop:
        pending = [used for node in sums for used in node.all_input_nodes] + [node for _, node in writes]
        needed: set[Node] = set()
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(node.all_input_nodes if self.is_vector(node) else [])
        vectors = [node for node in self.nodes if node in needed and self.is_vector(node)]
        values = [node for node in vectors if node.op != "placeholder"]
        reads = [self.inputs.index(node) for node in vectors if node.op == "placeholder"]
        scalars = [node for node in self.nodes if node in needed and not self.is_vector(node)]
        return Loop(level, sums, writes, values, reads, scalars)

    def entry_function(self, loop: Loop, number: int) -> str:
        """What a loop does with one entry, as a C function."""
        given = [*(self.inputs[i] for i in loop.reads), *loop.scalars]
        arguments = [f"const {self.type(node)} {self.name(node)}" for node in given]
        arguments += [f"{VALUE_TYPES[self.dtypes[operand]]}& w{i}" for i, (operand, _) in enumerate(loop.writes)]
        arguments += [f"double& s{i}" for i in range(len(loop.sums))]
        lines = [self.define(node, self.expression(node)) for node in loop.values]
        for i, (operand, node) in enumerate(loop.writes):
            lines.append(f"w{i} = {self.argument(node, VALUE_TYPES[self.dtypes[operand]])};")
        for i, node in enumerate(loop.sums):
            term = self.argument(node.args[0], "double")
            lines.append(f"s{i} += {term} * {term};" if self.is_norm(node) else f"s{i} += {term};")
        return f"INLINE void entry_{number}({', '.join(arguments)}) {{\n  " + "\n  ".join(lines) + "\n}\n"

    def entry_call(self, loop: Loop, number: int, read: str, write: str) -> str:
        """The call for one entry; ``read`` and ``write`` say how operand {0} is accessed."""
        outputs = " ".join(f"{VALUE_TYPES[self.dtypes[operand]]} w{i};" for i, (operand, _) in enumerate(loop.writes))
        arguments = [read.format(operand) for operand in loop.reads] + [self.name(n) for n in loop.scalars]
        arguments += [f"w{i}" for i in range(len(loop.writes))] + [f"s{i}" for i in range(len(loop.sums))]
        stores = " ".join(write.format(operand, f"w{i}") for i, (operand, _) in enumerate(loop.writes))
        return f"{outputs} entry_{number}({', '.join(arguments)}); {stores} }}\n"

    def loop_start(self, loop: Loop) -> str:
        """Pointers to the chunk, scalars from their slots, sums at zero."""
        lines = ["const i64 t = chunk_of[2 * c], begin = chunk_of[2 * c + 1];",
                 f"const i64 n = sizes[t] - begin < {CHUNK} ? sizes[t] - begin : {CHUNK};"]  # fmt: skip
        for operand in loop.operands:
            ctype = MEMORY_TYPES[self.dtypes[operand]]
            lines.append(f"{ctype}* const p{operand} = ({ctype}*)vectors[{operand} * tensors + t] + begin;")
        lines += [self.define(node, self.saved(node)) for node in loop.scalars]
        lines += [f"double s{i} = 0;" for i in range(len(loop.sums))]
        return "\n".join(lines) + "\n"

    def sums_before(self, level: int) -> list[Node]:
        return self.loop_at[level - 1][1].sums if level - 1 in self.loop_at else []

    def totals(self, level: int) -> str:
        """Add up the sums that the loop before this level left for every chunk."""
        sums = range(len(self.sums_before(level)))
        return "".join(f"const double total_{i} = total(sums + {i} * chunks, chunks);\n" for i in sums)

    def scalar_stage(self, level: int) -> str:
        """Compute the scalars of a level, save each for later stages, and write results."""
        here, sums = [node for node in self.slots if self.level[node] == level], self.sums_before(level)
        earlier = {used: None for node in here for used in node.all_input_nodes
                   if used in self.slots and self.level[used] < level}  # fmt: skip
        lines = [self.define(node, self.saved(node)) for node in earlier]
        for node in here:
            if node.op == "placeholder":
                value = f"load(*(const {MEMORY_TYPES[self.dtype(node)]}*)scalars[{self.inputs.index(node)}])"
            elif node in sums:
                value = f"total_{sums.index(node)}"
                value = f"{value} / {self.size}" if node.target is _aten.mean.dim else value
                value = f"({self.type(node)})" + (f"sqrt({value})" if self.is_norm(node) else f"({value})")
            else:
                value = self.expression(node)
            lines += [self.define(node, value), f"{self.saved(node)} = {self.name(node)};"]
        for operand, node in self.results:
            if not self.is_vector(node) and self.level[node] == level:
                value = self.argument(node, VALUE_TYPES[self.dtypes[operand]])
                lines.append(f"store(*({MEMORY_TYPES[self.dtypes[operand]]}*)scalars[{operand}], {value});")
        return "\n".join(lines) + "\n"

    # ---- The code for each device

    def source(self) -> Source:
        functions = "".join(self.entry_function(loop, i) for i, loop in enumerate(self.loops))
        half = "#define HALF\n" if torch.float16 in self.dtypes else ""
        return Source(cpu=half + ops.CPU_HEADER + functions + self.cpu(),
                      cuda=ops.CUDA_HEADER + functions + self.cuda(), stages=[sums for _, sums in self.stages()],
                      operands=len(self.dtypes), scalars=max(1, len(self.slots)),
                      sums=max([0, *(len(loop.sums) for loop in self.loops)]))  # fmt: skip

    def stages(self) -> list[tuple[str, int | None]]:
        """The stages by the names of their GPU functions, and how many sums each takes that is a loop."""
        stages: list[tuple[str, int | None]] = []
        for level in self.levels:
            stages.append((f"scalars_{level}", None))
            stages += [(f"loop_{level}", len(self.loop_at[level][1].sums))] if level in self.loop_at else []
        return stages

    def cpu(self) -> str:
        text = """extern "C" void run(i64 stage, const i64* scalars, const i64* vectors, i64 tensors,
  const i64* chunk_of, const i64* sizes, i64 chunks, double* saved, double* sums, i64 threads) {\n"""
        stages = iter(range(len(self.stages())))
        for level in self.levels:
            text += f"if (stage < 0 || stage == {next(stages)}) {{\n{self.totals(level)}{self.scalar_stage(level)}}}\n"
            if level in self.loop_at:
                text += f"if (stage < 0 || stage == {next(stages)})\n"
                number, loop = self.loop_at[level]
                names = [f"s{i}" for i in range(len(loop.sums))]
                reduction = f" reduction(+:{','.join(names)})" if names else ""
                text += "#pragma omp parallel for num_threads(threads) schedule(static)\n"
                text += "for (i64 c = 0; c < chunks; ++c) {\n" + self.loop_start(loop)
                text += f"#pragma omp simd{reduction}\nfor (i64 i = 0; i < n; ++i) {{ "
                text += self.entry_call(loop, number, "load(p{0}[i])", "store(p{0}[i], {1});")
                text += "".join(f"sums[{i} * chunks + c] = {name};\n" for i, name in enumerate(names)) + "}\n"
        return text + "}\n"

    def cuda(self) -> str:
        arguments = """const i64* scalars, const i64* vectors, int tensors, const i64* chunk_of, const i64* sizes,
  int chunks, double* saved, double* sums"""
        text = ""
        for level in self.levels:
            text += f"INLINE void scalars_{level}({arguments}) {{\n" + self.totals(level)
            text += "if (threadIdx.x) return;\n" + self.scalar_stage(level) + "}\n"
        for number, loop in enumerate(self.loops):
            text += f"INLINE void loop_{loop.level}({arguments}) {{\nconst int c = blockIdx.x;\n"
            text += self.loop_start(loop)
            aligned = " && ".join(f"aligned(p{operand})" for operand in loop.operands)
            text += f"const int fours = {aligned} ? (int)n / 4 : 0;\n"
            text += f"for (int i = threadIdx.x; i < fours; i += {THREADS}) {{\n"
            for operand in loop.operands:
                ctype = MEMORY_TYPES[self.dtypes[operand]]
                load = f" = ((const Four<{ctype}>*)p{operand})[i]" if operand in loop.reads else ""
                text += f"Four<{ctype}> f{operand}{load};\n"
            text += "#pragma unroll\nfor (int k = 0; k < 4; ++k) { "
            text += self.entry_call(loop, number, "load(f{0}.at[k])", "store(f{0}.at[k], {1});")
            for operand, _ in loop.writes:
                text += f"((Four<{MEMORY_TYPES[self.dtypes[operand]]}>*)p{operand})[i] = f{operand};\n"
            text += f"}}\nfor (int i = 4 * fours + threadIdx.x; i < (int)n; i += {THREADS}) {{ "
            text += self.entry_call(loop, number, "load(p{0}[i])", "store(p{0}[i], {1});")
            for i in range(len(loop.sums)):
                text += f"s{i} = block_sum(s{i}); if (!threadIdx.x) sums[{i} * chunks + c] = s{i};\n"
            text += "}\n"
        # One kernel for all stages: it is compiled once, which takes most of the first step.
        text += f'extern "C" __global__ void __launch_bounds__({THREADS}) run(int stage, {arguments}) {{\n'
        for i, (name, _) in enumerate(self.stages()):
            text += f"if (stage == {i}) {name}(scalars, vectors, tensors, chunk_of, sizes, chunks, saved, sums);\n"
        return text + "}\n"


def emit(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], size: int, targets: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> Source:  # fmt: skip
    """Translate a pure function of tensors that returns a list of tensors.

    It is traced on ``inputs``, vectors of shape ``(size,)`` and scalars; input i is operand i. ``targets`` are the
    operands that the results are written to (those of inputs, or ones beyond), ``dtypes`` those of all operands. Raises
    an UnsupportedError when the function does anything but arithmetic and sums over a vector, or when an input that is
    written is passed twice: a trace cannot tell the two apart.
    """
    written = [inputs[operand] for operand in targets if operand < len(inputs)]
    if any(sum(one is other for other in inputs) > 1 for one in written):
        raise UnsupportedError("a tensor that is written is two inputs")
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return _Emitter(graph, size, targets, dtypes).source()
