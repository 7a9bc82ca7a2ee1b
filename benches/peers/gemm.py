#!/usr/bin/env python3
"""Matrix products in PyTorch, the same cases as `ferrospeed bench gemm --json`, one JSON object per line."""

import kernels_common as common
import torch

LAYERS = [
    [512, 768, 768], [512, 1024, 4096], [1024, 768, 3072], [1024, 3072, 768],
    [2048, 1024, 4096], [2048, 2048, 2048], [4096, 768, 2304], [4096, 4096, 1024],
]
DECODE_LAYERS = [[1, 768, 2304], [1, 3072, 768], [1, 768, 50257], [8, 4096, 4096]]


def cases(dtype, only):
    layers = [("", layer, ("NN", "NT", "TN")) for layer in LAYERS]
    layers += [("decode ", layer, ("NN", "NT")) for layer in DECODE_LAYERS]
    for kind, (tokens, inputs, outputs), layouts in layers:
        for layout in layouts:
            name = f"{kind}{layout} {tokens}x{inputs}x{outputs}"
            if only not in name:
                continue
            x = torch.randn(tokens, inputs).to(dtype)
            shape = {"NN": (inputs, outputs), "NT": (outputs, inputs), "TN": (tokens, outputs)}[layout]
            y = torch.randn(*shape).to(dtype)
            a = x.t() if layout == "TN" else x
            b = y.t() if layout == "NT" else y
            result = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
            flops = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
            yield name, flops, lambda a=a, b=b, result=result: torch.mm(a, b, out=result)


if __name__ == "__main__":
    common.main(cases)
