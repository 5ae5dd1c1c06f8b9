"""The networks' equations for one sample, in plain loops on the parameters of a model.

Each takes the model, the embeddings e [F, D], the dense features d [N] and the sum of the wide weights, and returns a
scalar, or [T] of several tasks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Formula = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def mlp(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in (found for found in layers.layers if isinstance(found, nn.Linear)):
        x = torch.clamp(layer.weight @ x + layer.bias, min=0)
    return x


def linear(model: nn.Module, d: Tensor, wide: Tensor) -> Tensor:
    logit = wide + model.linear.bias[0]
    return logit + sum(d[i] * model.linear.kernel[i, 0] for i in range(len(d)))


def output(layer: nn.Module, x: Tensor) -> Tensor:
    logit = torch.dot(x, layer.kernel[:, 0])
    return logit if layer.bias is None else logit + layer.bias[0]


def pairs(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.dot(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i + 1, len(vectors))]


def flat(e: Tensor, d: Tensor) -> Tensor:
    return torch.cat([*e, d])


def fm(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    return linear(model, d, wide) + sum(pairs(e))


def wdl(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    return linear(model, d, wide) + output(model.output, mlp(model.mlp, flat(e, d)))


def deepfm(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    return wdl(model, e, d, wide) + sum(pairs(e))


def cross_and_deep(layer: Callable[[nn.Module, int, Tensor, Tensor], Tensor]) -> Formula:
    def formula(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
        start = x = flat(e, d)
        for index in range(len(model.cross.biases)):
            x = layer(model.cross, index, start, x) + x
        return linear(model, d, wide) + output(model.output, torch.cat([x, mlp(model.mlp, start)]))

    return formula


def vector_cross(cross: nn.Module, layer: int, start: Tensor, x: Tensor) -> Tensor:
    return start * torch.dot(x, cross.kernels[layer][:, 0]) + cross.biases[layer]


def matrix_cross(cross: nn.Module, layer: int, start: Tensor, x: Tensor) -> Tensor:
    return start * (cross.kernels[layer] @ x + cross.biases[layer])


def mixture_cross(cross: nn.Module, layer: int, start: Tensor, x: Tensor) -> Tensor:
    gates = torch.softmax(torch.stack([torch.dot(gate, x) for gate in cross.gate]), 0)
    total = torch.zeros_like(x)
    experts = zip(gates, cross.up[layer], cross.core[layer], cross.down[layer], strict=True)
    for gate, up, core, down in experts:
        inner = torch.tanh(core @ torch.tanh(down.T @ x))
        total = total + gate * (start * (up @ inner + cross.biases[layer]))
    return total


def dlrm(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    vectors, parts = list(e), []
    if len(d):
        bottom = mlp(model.bottom, d)
        vectors, parts = [bottom, *e], [bottom]
    return output(model.output, mlp(model.mlp, torch.cat([*parts, torch.stack(pairs(vectors))])))


def xdeepfm(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    fields, maps, sums = len(e), list(e), []
    for kernel in model.interactions.kernels:
        new = []
        for weights in kernel:
            total = torch.zeros_like(e[0])
            for i, x in enumerate(maps):
                for j in range(fields):
                    total = total + weights[i * fields + j] * x * e[j]
            new.append(total)
        maps = new
        sums += [row.sum() for row in maps]
    hidden = torch.cat([torch.stack(sums), mlp(model.mlp, flat(e, d))])
    return linear(model, d, wide) + output(model.output, hidden)


def with_dense(model: nn.Module, e: Tensor, d: Tensor) -> list[Tensor]:
    """Embeddings of all fields; those of dense features are vectors times the features."""
    return [*e, *(d[i] * model.embeddings.dense[i] for i in range(len(d)))]


def autoint(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    x = with_dense(model, e, d)
    for layer in model.interacting:
        heads, new = layer._heads, []
        width = layer.query.shape[1] // heads
        for m in x:
            parts = []
            for head in range(heads):
                own = slice(head * width, (head + 1) * width)
                scores = torch.stack([torch.dot(m @ layer.query[:, own], k @ layer.key[:, own]) for k in x])
                shares = torch.exp(scores) / torch.exp(scores).sum()
                parts.append(sum(share * (k @ layer.value[:, own]) for share, k in zip(shares, x, strict=True)))
            new.append(torch.clamp(torch.cat(parts) + m @ layer.residual, min=0))
        x = new
    hidden = torch.cat(x)
    if model.mlp is not None:
        hidden = torch.cat([hidden, mlp(model.mlp, flat(e, d))])
    return output(model.output, hidden)


def normalised(x: Tensor) -> Tensor:
    mean = x.mean()
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean() + 1e-5)


def mask_block(block: nn.Module, e: Tensor, x: Tensor) -> Tensor:
    mask = mlp(block.hidden, e) @ block.mask + block.mask_bias
    return torch.clamp(normalised((mask * x) @ block.kernel) * block.norm.weight + block.norm.bias, min=0)


def masknet(model: nn.Module, e: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    vectors, layer = with_dense(model, e, d), model.normalised
    scaled = [normalised(v) * scale + bias for v, scale, bias in zip(vectors, layer.scale, layer.bias, strict=True)]
    return torch.cat(vectors), torch.cat(scaled)


def masknet_serial(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    vector, x = masknet(model, e, d)
    for block in model.blocks:
        x = mask_block(block, vector, x)
    return output(model.output, x)


def masknet_parallel(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    vector, x = masknet(model, e, d)
    return output(model.output, mlp(model.mlp, torch.cat([mask_block(block, vector, x) for block in model.blocks])))


def finalmlp(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    streams = []
    for gate, stream in zip(model.gates, model.streams, strict=True):
        logits = mlp(gate.mlp, gate.context[0]) @ gate.kernel + gate.bias
        streams.append(mlp(stream, flat(e, d) * 2 / (1 + torch.exp(-logits))))
    x, y = streams
    fusion, logit = model.fusion, output(model.fusion.first, x) + output(model.fusion.second, y)
    heads = len(fusion.kernel)
    for head, kernel in enumerate(fusion.kernel):
        own = [vector[head * len(vector) // heads : (head + 1) * len(vector) // heads] for vector in (x, y)]
        logit = logit + own[0] @ kernel @ own[1]
    return logit


def finalnet(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    logits = []
    for block, end in zip(model.blocks, model.outputs, strict=True):
        x = flat(e, d)
        for layer in block:
            half = len(layer.bias) // 2
            u, v = (x @ layer.kernel[:, part] + layer.bias[part] for part in (slice(half), slice(half, None)))
            x = torch.clamp(u * (1 + v), min=0)
        logits.append(output(end, x))
    return sum(logits) / 2


def fcn(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    logits, start = [], torch.stack(with_dense(model, e, d))
    half = (start.shape[1] + 1) // 2
    for network, end, doubles in zip(model.crosses, model.outputs, (True, False), strict=True):
        x = start
        for kernel, bias, norm in zip(network.kernels, network.biases, network.norms, strict=True):
            c = kernel.T @ torch.cat([*x])
            masked = c * torch.clamp(normalised(c) * norm.weight + norm.bias, min=0)
            factors = [
                torch.cat([c[i * half : (i + 1) * half], masked[i * half : (i + 1) * half]])[: start.shape[1]]
                for i in range(len(start))
            ]
            x = (x if doubles else start) * (torch.stack(factors) + bias) + x
        logits.append(output(end, torch.cat([*x])))
    return sum(logits) / 2


def towers(layer: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """Logits [T], or a scalar of one task."""
    logits = [output(end, mlp(hidden, x)) for hidden, end, x in zip(layer.mlps, layer.outputs, inputs, strict=True)]
    return torch.stack(logits) if len(logits) > 1 else logits[0]


def mixed(gate: nn.Module, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    scores = [torch.exp(torch.dot(x, column)) for column in gate.kernel.T]
    assert len(scores) == len(outputs)
    return sum(score / sum(scores) * vector for score, vector in zip(scores, outputs, strict=True))


def shared_bottom(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    return towers(model.towers, [mlp(model.mlp, flat(e, d)) for _ in model.towers.mlps])


def mmoe(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    x = flat(e, d)
    return towers(model.towers, [mixed(gate, x, [mlp(expert, x) for expert in model.experts]) for gate in model.gates])


def ple(model: nn.Module, e: Tensor, d: Tensor, wide: Tensor) -> Tensor:
    of_tasks, shared = [flat(e, d) for _ in model.towers.mlps], flat(e, d)
    for level in model.levels:
        of_all = [mlp(expert, shared) for expert in level.shared]
        own = [[mlp(expert, x) for expert in experts] for experts, x in zip(level.tasks, of_tasks, strict=True)]
        new = [mixed(level.gates[k], of_tasks[k], own[k] + of_all) for k in range(len(own))]
        if level.shared_gate is not None:
            shared = mixed(level.shared_gate, shared, [*(vector for outputs in own for vector in outputs), *of_all])
        of_tasks = new
    return towers(model.towers, of_tasks)


FORMULAS: dict[str, Formula] = {
    "wdl": wdl,
    "deepfm": deepfm,
    "dcn": cross_and_deep(vector_cross),
    "dcnmix": cross_and_deep(mixture_cross),
    "dcnv2": cross_and_deep(matrix_cross),
    "fm": fm,
    "dlrm": dlrm,
    "xdeepfm": xdeepfm,
    "autoint": autoint,
    "masknet_serial": masknet_serial,
    "masknet_parallel": masknet_parallel,
    "finalmlp": finalmlp,
    "finalnet": finalnet,
    "fcn": fcn,
    "shared_bottom": shared_bottom,
    "mmoe": mmoe,
    "ple": ple,
}
