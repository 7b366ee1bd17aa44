"""A function of vectors as C loops over vectors that lie in many tensors.

A rule's update is traced once. What comes out is short: entry-by-entry arithmetic on long vectors, arithmetic
on single numbers, and sums over a vector. :func:`emit` turns it into C that runs as it is on any number of
tensors, wherever they lie: their addresses and sizes are data, not code. So compiling takes the same second
for one tensor and for four hundred, and a step is a fixed number of passes over the memory:

- *numbers* of level p: what depends on p sums after one another;
- *pass* p: the sums of level p + 1, chunk by chunk; in the last pass all results are written.

Entry-by-entry values are computed again in every pass that needs them: arithmetic is cheaper than memory.
The same text is compiled for the CPU (OpenMP) and for NVIDIA GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lategrad.execution.codegen.ops import (
    ARITHMETIC,
    COMPUTED,
    CPU_HEAD,
    CUDA_HEAD,
    FILLED,
    LOGIC,
    SAME,
    STORED,
    literal,
)
from lategrad.execution.unsupported import UnsupportedError

_aten = torch.ops.aten

CHUNK = 8192
"""Entries that one thread (CPU) or one block of threads (GPU) handles at a time."""

THREADS = 256
"""Threads of a block on a GPU; each takes four entries at a time."""


@dataclass
class Pass:
    """One pass over the vectors."""

    level: int
    nodes: list[Node] = field(default_factory=list)
    """What is computed for every entry."""
    reads: list[int] = field(default_factory=list)
    """The long inputs that it reads, by their places."""
    numbers: list[Node] = field(default_factory=list)
    sums: list[Node] = field(default_factory=list)
    writes: list[tuple[int, Node]] = field(default_factory=list)
    """The long places that it writes, and what."""


@dataclass
class Source:
    """C code, and what it wants to be called with."""

    cpu: str
    cuda: str
    """Both have a function ``run``; on a GPU its first argument is the stage."""
    stages: list[bool]
    """What to launch on a GPU, in this order: with a block for every chunk, or with one."""
    places: int
    numbers: int
    """Eight-byte slots for numbers between the passes."""
    sums: int
    """Sums of one pass, at most."""


class _Emitter:
    """A traced graph as passes; ``places`` are the tensors that the code is given, numbers and vectors apart."""

    def __init__(self, graph: GraphModule, size: int, targets: Sequence[int | None], dtypes: Sequence[torch.dtype]):
        graph.graph.eliminate_dead_code()
        self.graph, self.size = graph, size
        self.nodes = list(graph.graph.nodes)
        (results,) = next(node for node in self.nodes if node.op == "output").args
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.results = [(place, node) for place, node in zip(targets, results, strict=True) if place is not None]
        self.dtypes = dtypes
        self.level: dict[Node, int] = {}
        for node in self.nodes:
            if node.op != "output":
                below = max((self.level[used] for used in node.all_input_nodes), default=0)
                self.level[node] = below + 1 if self.is_sum(node) else below
        self.count = max(self.level.values()) + 1
        # A number that is ready after the last pass needs numbers of its own, but no pass.
        self.slots = {node: i for i, node in enumerate(n for n in self.nodes if self.is_number(n))}

    # ---- What kind of value

    def value(self, node: Node) -> Tensor:
        value = getattr(self.graph, str(node.target)) if node.op == "get_attr" else node.meta["val"]
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"{node.target} gives {type(value).__name__}")
        return value

    def is_long(self, node: Node) -> bool:
        shape = tuple(self.value(node).shape)
        if shape == (self.size,):
            return True
        if math.prod(shape) > 1:
            raise UnsupportedError(f"{node.target} has shape {shape}")
        return False

    def is_number(self, node: Node) -> bool:
        return node.op != "output" and not self.is_long(node) and self.value(node).numel() == 1

    def is_sum(self, node: Node) -> bool:
        if node.op != "call_function" or not self.is_number(node) or not any(map(self.is_long, node.all_input_nodes)):
            return False
        square = node.target is _aten.linalg_vector_norm.default and (len(node.args) < 2 or node.args[1] == 2)
        if not (square or node.target in (_aten.sum.dim_IntList, _aten.mean.dim)):
            raise UnsupportedError(f"{node.target} of a vector")
        return True

    def dtype(self, node: Node) -> torch.dtype:
        dtype = self.value(node).dtype
        if dtype not in STORED:
            raise UnsupportedError(f"{node.target} has dtype {dtype}")
        return dtype

    def type(self, node: Node) -> str:
        return COMPUTED[self.dtype(node)]

    # ---- Expressions

    def argument(self, value: Any, ctype: str) -> str:
        if isinstance(value, Node):
            return f"v{self.name(value)}" if self.type(value) == ctype else f"({ctype})v{self.name(value)}"
        if isinstance(value, bool | int | float):
            return f"({ctype})({literal(value)})"
        raise UnsupportedError(f"argument {value!r}")

    def name(self, node: Node) -> int:
        return self.nodes.index(node)

    def expression(self, node: Node) -> str:
        target, args, ctype = node.target, node.args, self.type(node)
        if node.op == "get_attr":
            return self.argument(self.value(node).item(), ctype)
        half = self.dtype(node) in (torch.bfloat16, torch.float16)
        if half and (target is not _aten._to_copy.default or self.dtype(node) not in self.dtypes):
            raise UnsupportedError(f"{target} in {self.dtype(node)}")  # it would have to be rounded
        if target in SAME:
            return self.argument(args[0], ctype)
        if target in FILLED:
            filled = FILLED[target]
            return self.argument(args[filled] if isinstance(filled, int) else filled, ctype)
        if node.kwargs.get("alpha", 1) != 1:
            raise UnsupportedError(f"{target} with alpha")
        if target in ARITHMETIC:
            return ARITHMETIC[target].format(*(self.argument(a, ctype) for a in args))
        if target in LOGIC:
            common = self.common_type(args)
            return LOGIC[target].format(*(self.argument(a, common) for a in args))
        if target is _aten.where.self:
            return f"{self.argument(args[0], 'bool')} ? " + " : ".join(self.argument(a, ctype) for a in args[1:])
        if target is _aten.clamp.default:
            low, high = (*args[1:], None)[:2]
            value = self.argument(args[0], ctype)
            for sign, bound in (("<", low), (">", high)):
                limit = None if bound is None else self.argument(bound, ctype)
                value = value if limit is None else f"({value} {sign} {limit} ? {limit} : {value})"
            return value
        if target is _aten.pow.Tensor_Scalar:
            return self.power(self.argument(args[0], ctype), args[1], ctype)
        if target in (_aten.lerp.Scalar, _aten.lerp.Tensor):
            a, b, share = (self.argument(x, ctype) for x in args)
            return f"{share} < 0.5f ? {a} + {share} * ({b} - {a}) : {b} - ({b} - {a}) * (1 - {share})"
        raise UnsupportedError(str(target))

    def common_type(self, args: Sequence[Any]) -> str:
        dtype = None
        for node in (a for a in args if isinstance(a, Node)):
            dtype = self.dtype(node) if dtype is None else torch.promote_types(dtype, self.dtype(node))
        if dtype is None or (not dtype.is_floating_point and any(isinstance(a, float) for a in args)):
            raise UnsupportedError(f"a comparison of {args}")
        return COMPUTED[dtype]

    def power(self, base: str, exponent: Any, ctype: str) -> str:
        simple = {0: "1", 1: base, 2: f"{base} * {base}", 0.5: f"sqrt({base})", -1: f"1 / {base}"}
        if exponent in simple:
            return simple[exponent]
        return f"pow({base}, {self.argument(exponent, ctype)})"

    # ---- Passes

    def passes(self) -> list[Pass]:
        sums = [node for node in self.nodes if node.op != "output" and self.is_sum(node)]
        results = [(place, node) for place, node in self.results if self.is_long(node)]
        # Whatever a sum reads must not have been overwritten.
        last = max([self.level[node] for _, node in results] + [self.level[node] - 1 for node in sums], default=-1)
        planned = []
        for level in range(last + 1):
            of_level = [node for node in sums if self.level[node] == level + 1]
            if of_level or level == last:
                planned.append(self._pass(Pass(level, sums=of_level, writes=results if level == last else [])))
        return planned

    def _pass(self, one: Pass) -> Pass:
        wanted = [used for node in one.sums for used in node.all_input_nodes] + [node for _, node in one.writes]
        seen: set[Node] = set()
        while wanted:
            node = wanted.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.is_long(node):
                wanted.extend(node.all_input_nodes)
        ordered = [node for node in self.nodes if node in seen]
        one.numbers = [node for node in ordered if not self.is_long(node)]
        one.reads = [self.inputs.index(node) for node in ordered if self.is_long(node) and node.op == "placeholder"]
        one.nodes = [node for node in ordered if self.is_long(node) and node.op != "placeholder"]
        return one

    def body(self, one: Pass, which: int) -> str:
        """What one pass does with one entry."""
        read = [self.inputs[place] for place in one.reads]
        arguments = [f"const {self.type(n)} v{self.name(n)}" for n in [*read, *one.numbers]]
        arguments += [f"{COMPUTED[self.dtypes[place]]}& w{i}" for i, (place, _) in enumerate(one.writes)]
        arguments += [f"double& s{i}" for i in range(len(one.sums))]
        lines = [f"const {self.type(n)} v{self.name(n)} = {self.expression(n)};" for n in one.nodes]
        for i, (place, node) in enumerate(one.writes):
            lines.append(f"w{i} = {self.argument(node, COMPUTED[self.dtypes[place]])};")
        for i, node in enumerate(one.sums):
            term = self.argument(node.args[0], "double")
            lines.append(f"s{i} += {term} * {term};" if self.is_norm(node) else f"s{i} += {term};")
        return f"INLINE void entry_{which}({', '.join(arguments)}) {{\n  " + "\n  ".join(lines) + "\n}\n"

    def is_norm(self, node: Node) -> bool:
        return node.target is _aten.linalg_vector_norm.default

    def numbers(self, level: int, passes: list[Pass]) -> list[str]:
        """The numbers of a level: each is computed, kept for the passes, and written where it belongs."""
        lines = []
        before = {n for n in self.slots if self.level[n] < level}
        here = [n for n in self.slots if self.level[n] == level]
        for node in {used: None for n in here for used in n.all_input_nodes if used in before}:
            lines.append(f"const {self.type(node)} v{self.name(node)} = {self.kept(node)};")
        sums = next((p.sums for p in passes if p.level == level - 1), [])
        for node in here:
            ctype, name = self.type(node), f"v{self.name(node)}"
            if node.op == "placeholder":
                place = self.inputs.index(node)
                value = f"load(*(const {STORED[self.dtype(node)]}*)numbers[{place}])"
            elif node in sums:
                value = f"total_{sums.index(node)}"
                value = f"{value} / {self.size}" if node.target is _aten.mean.dim else value
                value = f"({ctype})" + (f"sqrt({value})" if self.is_norm(node) else f"({value})")
            else:
                value = self.expression(node)
            lines.append(f"const {ctype} {name} = {value};")
            lines.append(f"{self.kept(node)} = {name};")
        for place, node in self.results:
            if not self.is_long(node) and self.level[node] == level:
                value = self.argument(node, COMPUTED[self.dtypes[place]])
                lines.append(f"store(*({STORED[self.dtypes[place]]}*)numbers[{place}], {value});")
        return lines

    def kept(self, node: Node) -> str:
        return f"*({self.type(node)}*)(kept + {self.slots[node]})"

    # ---- The two forms

    def source(self) -> Source:
        stays = dict(enumerate(self.inputs))
        self.results = [(place, node) for place, node in self.results
                        if self.value(node).numel() and stays.get(place) is not node]  # fmt: skip
        passes = self.passes()
        bodies = "".join(self.body(one, i) for i, one in enumerate(passes))
        levels = [self.numbers(level, passes) for level in range(self.count)]
        most = max((len(one.sums) for one in passes), default=0)
        return Source(
            cpu=("#define HALF\n" if torch.float16 in self.dtypes else "")
            + CPU_HEAD
            + bodies
            + self.cpu(passes, levels),
            cuda=CUDA_HEAD + bodies + self.cuda(passes, levels),
            stages=[over_chunks for _, over_chunks in self.stages(passes)],
            places=len(self.dtypes),
            numbers=max(1, len(self.slots)),
            sums=max(1, most),
        )

    def stages(self, passes: list[Pass]) -> list[tuple[str, bool]]:
        """The functions of the GPU's code in their order, and whether each takes a block for every chunk."""
        with_pass = {one.level for one in passes}
        stages = []
        for level in range(self.count):
            stages.append((f"numbers_{level}", False))
            if level in with_pass:
                stages.append((f"pass_{level}", True))
        return stages

    def pointers(self, one: Pass) -> list[str]:
        lines = []
        for place in dict.fromkeys([*one.reads, *(place for place, _ in one.writes)]):
            ctype = STORED[self.dtypes[place]]
            lines.append(f"{ctype}* const p{place} = ({ctype}*)vectors[{place} * tensors + t] + begin;")
        for node in one.numbers:
            lines.append(f"const {self.type(node)} v{self.name(node)} = {self.kept(node)};")
        lines.extend(f"double s{i} = 0;" for i in range(len(one.sums)))
        return lines

    def entry(self, one: Pass, which: int, read: str, write: str) -> str:
        """The call for one entry, with texts for reading and writing place {0}."""
        outs = " ".join(f"{COMPUTED[self.dtypes[place]]} w{i};" for i, (place, _) in enumerate(one.writes))
        arguments = [read.format(place) for place in one.reads] + [f"v{self.name(n)}" for n in one.numbers]
        arguments += [f"w{i}" for i in range(len(one.writes))] + [f"s{i}" for i in range(len(one.sums))]
        stores = " ".join(write.format(place, f"w{i}") for i, (place, _) in enumerate(one.writes))
        return f"{outs} entry_{which}({', '.join(arguments)}); {stores}"

    def totals(self, passes: list[Pass], level: int) -> str:
        """The sums that the pass before this level has left for every chunk."""
        sums = next((one.sums for one in passes if one.level == level - 1), [])
        return "".join(f"const double total_{i} = total(sums + {i} * chunks, chunks);\n" for i in range(len(sums)))

    def cpu(self, passes: list[Pass], levels: list[list[str]]) -> str:
        text = """extern "C" void run(const i64* numbers, const i64* vectors, i64 tensors, const i64* where,
  const i64* sizes, i64 chunks, double* kept, double* sums, i64 threads) {\n"""
        by_level = {one.level: (i, one) for i, one in enumerate(passes)}
        for level, lines in enumerate(levels):
            text += "{\n"
            text += self.totals(passes, level)
            text += "\n".join(lines) + "\n}\n"
            if level in by_level:
                which, one = by_level[level]
                reduction = f" reduction(+:{','.join(f's{i}' for i in range(len(one.sums)))})" if one.sums else ""
                text += "#pragma omp parallel for num_threads(threads) schedule(static)\n"
                text += "for (i64 c = 0; c < chunks; ++c) {\n"
                text += "const i64 t = where[2 * c], begin = where[2 * c + 1];\n"
                text += f"const i64 n = sizes[t] - begin < {CHUNK} ? sizes[t] - begin : {CHUNK};\n"
                text += "\n".join(self.pointers(one))
                text += f"\n#pragma omp simd{reduction}\nfor (i64 i = 0; i < n; ++i) {{ "
                text += self.entry(one, which, "load(p{0}[i])", "store(p{0}[i], {1});") + " }\n"
                text += "".join(f"sums[{i} * chunks + c] = s{i};\n" for i in range(len(one.sums))) + "}\n"
        return text + "}\n"

    def cuda(self, passes: list[Pass], levels: list[list[str]]) -> str:
        text = ""
        arguments = """const i64* numbers, const i64* vectors, int tensors, const i64* where, const i64* sizes,
  int chunks, double* kept, double* sums"""
        for level, lines in enumerate(levels):
            text += f"INLINE void numbers_{level}({arguments}) {{\n"
            text += self.totals(passes, level)
            text += "if (threadIdx.x) return;\n" + "\n".join(lines) + "\n}\n"
        for which, one in enumerate(passes):
            text += f"INLINE void pass_{one.level}({arguments}) {{\n"
            text += "const int c = blockIdx.x;\nconst i64 t = where[2 * c], begin = where[2 * c + 1];\n"
            text += f"const int n = sizes[t] - begin < {CHUNK} ? (int)(sizes[t] - begin) : {CHUNK};\n"
            text += "\n".join(self.pointers(one)) + "\n"
            places = list(dict.fromkeys([*one.reads, *(place for place, _ in one.writes)]))
            aligned = " && ".join(f"aligned(p{place})" for place in places)
            text += f"const int fours = {aligned} ? n / 4 : 0;\n"
            text += f"for (int i = threadIdx.x; i < fours; i += {THREADS}) {{\n"
            for place in places:
                ctype = STORED[self.dtypes[place]]
                load = f" = ((const Four<{ctype}>*)p{place})[i]" if place in one.reads else ""
                text += f"Four<{ctype}> f{place}{load};\n"
            text += "#pragma unroll\nfor (int k = 0; k < 4; ++k) { "
            text += self.entry(one, which, "load(f{0}.at[k])", "store(f{0}.at[k], {1});") + " }\n"
            for place, _ in one.writes:
                text += f"((Four<{STORED[self.dtypes[place]]}>*)p{place})[i] = f{place};\n"
            text += f"}}\nfor (int i = 4 * fours + threadIdx.x; i < n; i += {THREADS}) {{ "
            text += self.entry(one, which, "load(p{0}[i])", "store(p{0}[i], {1});") + " }\n"
            for i in range(len(one.sums)):
                text += f"s{i} = block_sum(s{i}); if (!threadIdx.x) sums[{i} * chunks + c] = s{i};\n"
            text += "}\n"
        # One kernel for all stages: it is compiled once, which takes most of the first step.
        text += f'extern "C" __global__ void __launch_bounds__({THREADS}) run(int stage, {arguments}) {{\n'
        for i, (name, _) in enumerate(self.stages(passes)):
            text += f"if (stage == {i}) {name}(numbers, vectors, tensors, where, sizes, chunks, kept, sums);\n"
        return text + "}\n"


def emit(
    function: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    size: int,
    targets: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
) -> Source:
    """The function as C.

    Args:
        function: of tensors, returns a list of tensors; pure.
        inputs: what it is traced on: vectors of shape ``(size,)``, and single numbers. Input i has place i.
        size: the length of the vectors.
        targets: for each result, the place that it is written to, or None: that of an input, or beyond.
        dtypes: of what lies at each place.

    Raises:
        UnsupportedError: when it does something else than arithmetic and sums over a vector, or when an input that is
            written is another input, too: a trace cannot tell the two apart.
    """
    written = [inputs[place] for place in targets if place is not None and place < len(inputs)]
    if any(sum(one is other for other in inputs) > 1 for one in written):
        raise UnsupportedError("a tensor that is written is two inputs")
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return _Emitter(graph, size, targets, dtypes).source()
