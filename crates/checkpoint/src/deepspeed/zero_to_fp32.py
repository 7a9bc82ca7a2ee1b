#!/usr/bin/env python3
"""Makes one file with all weights in f32 of the ZeRO checkpoint in this folder. It needs PyTorch and nothing else.

    python zero_to_fp32.py FOLDER OUTPUT [-t TAG] [--exclude_frozen_parameters]

FOLDER is the one that holds `latest`; OUTPUT is written by `torch.save`, and `model.load_state_dict(torch.load(OUTPUT))`
reads it. Written by Ferrospeed (`ferrospeed checkpoint to-fp32` does the same without Python) for stages 1, 2 and 3; of what
the files hold only tensors and plain data are looked at, and nothing that they name is run.
"""

import argparse
import collections
import os
import pickle
import re
import types

import torch

# What a file of tensors needs to be read. Every other name in it becomes an `Unknown`.
TORCH_NAMES = re.compile(r"_rebuild_\w+|Size|device|[A-Z][a-z0-9]*Storage|float\d+|bfloat16|int\d+|uint8|bool|Tensor")
PLAIN_NAMES = {("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "slice")}


class Unknown:
    """An object of somebody's program, of which only the arguments are kept."""

    def __init__(self, *args, **named):
        self.args = args

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass

    def extend(self, values):
        pass


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        of_torch = module.split(".")[0] == "torch" and TORCH_NAMES.fullmatch(name)
        return super().find_class(module, name) if of_torch or (module, name) in PLAIN_NAMES else Unknown


def read(path):
    reading = types.ModuleType("reading")
    reading.Unpickler, reading.load = Reader, lambda file, **named: Reader(file, **named).load()
    return torch.load(path, map_location="cpu", pickle_module=reading, weights_only=False)


def in_order(folder, ending):
    numbers = lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    names = sorted((name for name in os.listdir(folder) if name.endswith(ending)), key=numbers)
    if not names:
        raise FileNotFoundError(f"{folder} has no file that ends with {ending}")
    return [read(os.path.join(folder, name)) for name in names]


def folder_of(checkpoint_dir, tag):
    if tag is None:
        latest = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(latest):
            raise ValueError(f"{latest} is not there: name the checkpoint with --tag")
        with open(latest) as file:
            tag = file.read().strip()
    folder = os.path.join(checkpoint_dir, tag)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is no folder")
    return folder


def plain(value):
    """A number that is written as the member of an enumeration."""
    return value.args[0] if isinstance(value, Unknown) else value


def take(flat, shapes, ranks):
    """The parameters that lie end to end in a flat array, which is filled up to a multiple of twice the ranks."""
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = flat.narrow(0, at, shape.numel()).view(shape).clone()
        at += shape.numel()
    whole = lambda count: -(-count // (2 * ranks)) * 2 * ranks
    if whole(at) != whole(flat.numel()):
        raise ValueError(f"{at} numbers of {flat.numel()} belong to parameters")
    return found


def join(parts, offset, shape):
    """A parameter of which every rank has an equal piece, the last of them filled up."""
    piece = -(-shape.numel() // len(parts))
    pieces = torch.cat([part.narrow(0, offset, piece) for part in parts])
    return pieces.narrow(0, 0, shape.numel()).view(shape).clone(), offset + piece


def trained(states, stage, model):
    if stage < 3:
        found = {}
        for group, shapes in enumerate(model["param_shapes"]):
            parts = [state["single_partition_of_fp32_groups"][group] for state in states]
            found.update(take(torch.cat(parts), shapes, len(states)))
        return found
    parts = [torch.cat([flat.reshape(-1) for flat in state["fp32_flat_groups"]]) for state in states]
    found, offset = {}, 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            found[name], offset = join(parts, offset, shape)
    if offset != parts[0].numel():
        raise ValueError(f"{offset} numbers of {parts[0].numel()} on each rank belong to parameters")
    return found


def frozen(models, stage):
    shapes = models[0].get("frozen_param_shapes") or {}
    found = {}
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        found[name] = join([part.reshape(-1) for part in parts], 0, shape)[0] if stage == 3 else parts[0]
    return found


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False):
    """All weights of a checkpoint by name: buffers, frozen parameters, trained ones, other names of tied ones."""
    folder = folder_of(checkpoint_dir, tag)
    states = [file["optimizer_state_dict"] for file in in_order(folder, "_optim_states.pt")]
    models = in_order(folder, "_model_states.pt")
    if "zero_stage" not in states[0] or not models[0].get("param_shapes"):
        raise ValueError(f"{folder} is no ZeRO checkpoint of a whole model")
    stage, ranks = plain(states[0]["zero_stage"]), states[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, (list, tuple)) else ranks
    if ranks != len(states):
        raise ValueError(f"{folder} has files of {len(states)} ranks, and {ranks} wrote it")
    model = models[0]
    weights = collections.OrderedDict()
    for name in model["buffer_names"]:
        weights[name] = model["module"][name].float()
    if not exclude_frozen_parameters:
        weights.update(frozen(models, stage))
    weights.update(trained(states, stage, model))
    for alias, name in (model.get("shared_params") or {}).items():
        if name in weights:
            weights[alias] = weights[name]
    return weights


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_file, tag=None, exclude_frozen_parameters=False):
    """The same, into a file."""
    weights = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    torch.save(weights, output_file)
    return weights


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """The same, into a model on the CPU, which is returned."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint_dir", help="the folder that holds the checkpoint's folder, and `latest`")
    parser.add_argument("output_file", help="where the weights go, such as pytorch_model.bin")
    parser.add_argument("-t", "--tag", help="the checkpoint's folder; default: the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("-d", "--debug", action="store_true", help="also name every tensor")
    args = parser.parse_args()
    weights = convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir, args.output_file, args.tag, args.exclude_frozen_parameters
    )
    if args.debug:
        for name, value in weights.items():
            print(name, tuple(value.shape), value.dtype)
    print(f"{len(weights)} tensors in {args.output_file}")


if __name__ == "__main__":
    main()
