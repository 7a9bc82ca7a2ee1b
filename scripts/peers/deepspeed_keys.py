"""Lists every key that DeepSpeed's configuration knows, with an example value that is not the default.

Made with DeepSpeed 0.19.8 (torch 2.13.0): `python scripts/peers/deepspeed_keys.py > crates/config/tests/deepspeed-keys.json`.

Sections with a pydantic model are read from the model. All others are read by functions that ask a dict for keys, so a
dict that writes down what it is asked for finds them.
"""
import enum, importlib.metadata, inspect, json, os, sys, typing

stdout, sys.stdout = sys.stdout, sys.stderr
os.environ.setdefault("DS_ACCELERATOR", "cpu")
from pydantic import BaseModel
import deepspeed.runtime.config as config
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.data_pipeline import config as data
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

known = {}
# Examples where neither a default nor a type says what may be written.
EXAMPLES = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1,
    "communication_data_type": "fp16", "seq_parallel_comm_data_type": "bf16", "optimizer.type": "AdamW",
    "optimizer.params": {}, "scheduler.type": "WarmupLR", "scheduler.params": {}, "gradient_allreduce_op": "sum",
    "zero_optimization.stage": 1, "torch_autocast.dtype": "bfloat16", "data_types.grad_accum_dtype": "fp32",
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"], "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "fp32", "data_types.keep_in_fp32_modules": ["rotary"],
    "zero_optimization.offload_param.device": "cpu", "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.zenflow.select_strategy": "step", "zero_optimization.zenflow.select_interval": 4,
    "zero_optimization.zenflow.update_interval": 4, "checkpoint.tag_validation": "Fail", "log_level": "info",
    "checkpoint.writer.type": "FAST", "checkpoint.writer.data_parallel": "SOCKET", "autotuning.metric": "latency",
    "autotuning.tuner_type": "random", "pipeline.partition": "uniform", "pipeline.stages": 2,
    "tensor_parallel.dtype": "bf16", "tensor_parallel.vocab_parallel_ce_backend": "liger", "datastates_ckpt": {},
    "weight_quantization.quantized_initialization.q_type": "symmetric", "compile.passes": ["z3"],
    "expert_parallel.comm_backend": "comm", "autotuning.arg_mappings": {"a": "--a"},
    "activation_checkpointing.number_checkpoints": 2, "autotuning.max_train_batch_size": 8, "steps_per_print": 5,
    "autotuning.model_info.hidden_size": 64, "autotuning.model_info.num_layers": 2, "autotuning.model_info.num_params": 10,
    "expert_parallel.has_shared_experts": True, "expert_parallel.route_norm": True, "expert_parallel.num_expert_groups": 2,
    "expert_parallel.num_limited_groups": 2, "expert_parallel.load_balance_coeff": None, "optimizer.legacy_fusion": True,
    "tensor_parallel.partition_config": {"use_default_specs": False},
    "wandb.project": "mine", "tensorboard.job_name": "mine", "csv_monitor.job_name": "mine",
}
# Objects of a program, which no file can hold.
NOT_IN_FILES = {f"tensor_parallel.{name}" for name in ("tp.mpu", "tp.tp_group", "tensor_parallel.mpu",
                                                       "tensor_parallel.tp_group", "injection_policy_tuple")}
# What readers of the section `checkpoint` ask for when they are given the whole.
OF_A_SECTION = {"parallel_write", "tag_validation"}


def example(path, default, annotation=None):
    if path in EXAMPLES:
        return EXAMPLES[path]
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return int(default) + 1 if default < 2**62 else 2**40
    if isinstance(default, float):
        return default / 2 if default else 0.5
    if isinstance(default, (str, list, dict)):
        return default
    for kind, value in [(bool, True), (int, 2), (float, 0.5), (str, "a"), (list, ["a"]), (dict, {})]:
        if kind is annotation or kind in typing.get_args(annotation) or typing.get_origin(annotation) is kind:
            return value
    return "a" if annotation is None or "Path" in str(annotation) else None


def add(path, default, annotation=None):
    if path not in NOT_IN_FILES:
        known.setdefault(path, example(path, default, annotation))


def model(path, cls):
    for name, field in cls.model_fields.items():
        kinds = [k for k in (field.annotation, *typing.get_args(field.annotation)) if inspect.isclass(k)]
        inner = next((k for k in kinds if issubclass(k, BaseModel)), None)
        for spelling in {name, field.alias or name}:
            if inner:
                model(f"{path}{spelling}.", inner)
            else:
                default = field.get_default(call_default_factory=True)
                add(path + spelling, None if not isinstance(default, (bool, int, float, str, list, dict, enum.Enum)) else default, field.annotation)


class Asked(dict):
    """Writes down every key it is asked for; what is a section is one of these again."""

    def __init__(self, path, sections):
        super().__init__()
        self.path, self.sections = path, sections

    def child(self, key):
        return Asked(f"{self.path}{key}.", self.sections)

    def is_section(self, key):
        return f"{self.path}{key}" in self.sections

    def get(self, key, default=None):
        if self.is_section(key):
            return self.child(key)
        add(self.path + key, default)
        return default

    def __getitem__(self, key):
        return self.get(key)

    def __contains__(self, key):
        if not self.is_section(key):
            known.setdefault(self.path + key, example(self.path + key, None))
        return self.is_section(key)

    def keys(self):
        return self

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return True

    def items(self):
        return ()


for path, cls in {
    "zero_optimization.": DeepSpeedZeroConfig,
    "fp16.": type(config.get_float16_config({})), "bf16.": type(config.get_bfloat16_config({})),
    "": type(config.get_monitor_config({})), "hybrid_engine.": config.HybridEngineConfig,
    "compile.": config.CompileConfig, "tensor_parallel.": TPTrainingConfig, "timers.throughput.": type(config.get_timers_config({})),
    "weight_quantization.": WeightQuantConfig, "comms_logger.": CommsLoggerConfig,
}.items():
    model(path, cls)

SECTIONS = {
    "optimizer", "scheduler", "activation_checkpointing", "flops_profiler", "autotuning", "autotuning.model_info", "aio",
    "checkpoint", "checkpoint.writer", "checkpoint.parallel_write", "data_types", "torch_autocast", "expert_parallel",
    "data_efficiency", "data_efficiency.data_sampling", "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_routing", "data_efficiency.data_routing.random_ltd",
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule",
    "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule",
}
asked = Asked("", SECTIONS)
readers = [f for name, f in vars(config).items()
           if inspect.isfunction(f) and name.startswith("get_") and f.__module__.startswith("deepspeed")]
readers += [config.DeepSpeedFlopsProfilerConfig, config.DeepSpeedAutotuningConfig,
            config.DeepSpeedActivationCheckpointingConfig, config.DeepSpeedDataStatesConfig, data.get_data_efficiency_config]
for reader in readers:
    try:
        reader(asked)
    except Exception as error:  # a value of the wrong type, after the keys were asked for
        print(f"{getattr(reader, '__name__', reader)}: {type(error).__name__}: {error}", file=sys.stderr)
config.get_checkpoint_parallel_write_pipeline(asked.child("checkpoint"))
for key in ("load_universal", "use_node_local_storage"):
    known.setdefault(f"checkpoint.{key}", True)
for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"):
    known.setdefault(f"data_types.{key}", EXAMPLES[f"data_types.{key}"])
for key, default in {"stages": "auto", "partition": "best", "seed_layers": False, "activation_checkpoint_interval": 0,
                     "pipe_partitioned": True, "grad_partitioned": True, "use_reentrant": True}.items():
    add(f"pipeline.{key}", default)
for key, value in {"enabled": True, "metrics_path": "a", "lr_scaling_method": "sqrt", "min_batch_size": 2,
                   "max_batch_size": 8, "sequence_picking_order": "random", "max_tokens": 64, "verbose": True}.items():
    known[f"data_efficiency.data_sampling.dynamic_batching.{key}"] = value
# What this version refuses by name, earlier ones took.
for key, value in {"sparse_gradients": True, "graph_harvesting": True, "zero_optimization.mics_shard_size": 2,
                   "zero_optimization.mics_hierarchical_params_gather": True,
                   "zero_optimization.zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
                   "sequence_parallel_size": 2, "data_parallel_size": 2}.items():
    known.setdefault(key, value)

# Names that are sections, and those asked for only because a reader looked in the wrong dict.
sections = {path.rsplit(".", depth)[0] for path in known for depth in range(1, path.count(".") + 1)}
rest = {path: value for path, value in known.items() if path not in OF_A_SECTION and (path not in sections or value not in (None, {}, "a"))}

schedules = {}
for name in lr_schedules.VALID_LR_SCHEDULES:
    signature = inspect.signature(getattr(lr_schedules, name))
    schedules[name] = [p for p in signature.parameters if p != "optimizer"]
document = {
    "made_with": {"deepspeed": importlib.metadata.version("deepspeed")},
    "keys": dict(sorted(rest.items())),
    "optimizers": sorted(config.DEEPSPEED_OPTIMIZERS),
    "schedules": schedules,
}
json.dump(document, stdout, indent=1)
stdout.write("\n")
