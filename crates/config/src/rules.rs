//! Rules between options: what contradicts what, and what has no effect where.
//!
//! Each rule looks at the configuration with all defaults filled in, and names the option to change.

mod data;

use std::num::NonZeroUsize;
use std::path::{Component, Path};

use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::division::Asked;
use serde_json::{Map, Value};

use crate::auto::lookup;
use crate::check::Places;
use crate::diagnostic::{Code, Report};
use crate::elasticity::MAX_MICRO_BATCH_SIZES;

/// Optimizers that ZeRO is tested with.
const TESTED_WITH_ZERO: [&str; 6] = ["Adam", "AdamW", "Adagrad", "Lion", "Muon", "ScheduleFreeAdamW"];
const ONE_BIT: [&str; 3] = ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"];

/// What the rules read and where they write.
struct Rules<'a> {
    full: &'a Map<String, Value>,
    places: &'a Places,
    report: Report,
}

/// Applies every rule.
pub(crate) fn check(full: &Map<String, Value>, places: &Places) -> Report {
    let mut rules = Rules { full, places, report: Report::default() };
    rules.precision();
    rules.optimizer();
    rules.scheduler();
    rules.zero();
    rules.offload();
    rules.pipeline();
    rules.spread();
    rules.activations();
    rules.gradient_accumulation_type();
    rules.elasticity();
    rules.data();
    rules.compression();
    rules.monitors();
    rules.report
}

impl Rules<'_> {
    fn flag(&self, path: &str) -> bool {
        lookup(self.full, path).and_then(Value::as_bool).unwrap_or(false)
    }

    fn number(&self, path: &str) -> f64 {
        lookup(self.full, path).and_then(Value::as_f64).unwrap_or(0.0)
    }

    fn text(&self, path: &str) -> Option<&str> {
        lookup(self.full, path).and_then(Value::as_str)
    }

    fn stage(&self) -> i64 {
        lookup(self.full, "zero_optimization.stage").and_then(Value::as_i64).unwrap_or(0)
    }

    fn conflict(&mut self, path: &str, why: impl Into<String>, help: impl Into<String>) {
        self.report.push(self.places.error(Code::Conflict, path, why, help));
    }

    fn unsupported(&mut self, path: &str, why: impl Into<String>, help: impl Into<String>) {
        self.report.push(self.places.error(Code::UnsupportedCombination, path, why, help));
    }

    fn missing(&mut self, path: &str, why: impl Into<String>, help: impl Into<String>) {
        self.report.push(self.places.error(Code::Missing, path, why, help));
    }

    fn no_effect(&mut self, path: &str, why: impl Into<String>, help: impl Into<String>) {
        self.report.push(self.places.warning(Code::NoEffect, path, why, help));
    }

    fn precision(&mut self) {
        let (fp16, bf16) = (self.flag("fp16.enabled"), self.flag("bf16.enabled"));
        if fp16 && bf16 {
            self.conflict("bf16.enabled", "fp16 and bf16 are both enabled", "keep one of them");
        }
        if self.flag("eigenvalue.enabled") && (fp16 || bf16) {
            let why = "has no effect with 16-bit weights: a small change of them is rounded away";
            self.no_effect("eigenvalue.enabled", why, "remove it, or train in fp32");
        }
        let vocabulary = self.number("vocabulary_size");
        if vocabulary % 8.0 != 0.0 {
            let why = format!("{vocabulary} is not a multiple of 8, which matrix units prefer");
            self.no_effect("vocabulary_size", why, "pad the vocabulary of the model");
        }
    }

    fn optimizer(&mut self) {
        let Some(name) = self.text("optimizer.type").map(str::to_owned) else { return };
        let stage = self.stage();
        if ONE_BIT.contains(&name.as_str()) {
            if stage > 0 {
                let why = format!("{name} cannot be combined with ZeRO, and the stage is {stage}");
                self.unsupported("optimizer.type", why, "write \"stage\": 0, or another optimizer");
            }
        } else if stage > 0
            && !TESTED_WITH_ZERO.contains(&name.as_str())
            && !self.flag("zero_allow_untested_optimizer")
        {
            let why = format!("ZeRO is not tested with {name}");
            self.unsupported(
                "optimizer.type",
                why,
                "add \"zero_allow_untested_optimizer\": true to run it all the same",
            );
        }
        if name.ends_with("amb") && self.flag("fp16.enabled") && self.number("fp16.loss_scale") != 0.0 {
            let why = format!("{name} needs adaptive loss scaling");
            self.unsupported("fp16.loss_scale", why, "write \"loss_scale\": 0");
        }
        if self.flag("optimizer.params.amsgrad") && (name == "Lamb" || ONE_BIT.contains(&name.as_str())) {
            self.unsupported("optimizer.params.amsgrad", "AMSGrad is not supported", "remove it");
        }
        let first_beta = lookup(self.full, "optimizer.params.betas").and_then(|betas| betas.get(0));
        if name == "ScheduleFreeAdamW" {
            if first_beta.and_then(Value::as_f64) == Some(0.0) {
                let why = "without the first nothing leads from weights to their mean";
                self.unsupported("optimizer.params.betas", why, "write a first one above 0, such as 0.9");
            }
            if self.text("scheduler.type").is_some() {
                let why = "ScheduleFreeAdamW has no schedule, and its mean counts on a rate that stays";
                self.unsupported("scheduler", why, "remove it; `warmup_steps` of the optimizer warms up");
            }
        }
        let second_beta = lookup(self.full, "optimizer.params.betas").and_then(|betas| betas.get(1));
        if name == "Muon" && second_beta.and_then(Value::as_f64) == Some(0.0) {
            let why = "a second moment that nothing of is kept is none";
            self.unsupported("optimizer.params.betas", why, "write a second decay above 0");
        }
        if self.flag("optimizer.params.per_head_muon") {
            let why = "models do not say which rows of a matrix are whose head's";
            self.unsupported(
                "optimizer.params.per_head_muon",
                why,
                "remove it: whole matrices are made orthogonal",
            );
        }
        for [least, most] in [["min_coeff", "max_coeff"], ["factor_min", "factor_max"]] {
            let [low, high] = [least, most].map(|key| self.number(&format!("optimizer.params.{key}")));
            if low > high {
                let why = format!("{low} is larger than {most} {high}");
                self.conflict(&format!("optimizer.params.{least}"), why, "exchange them");
            }
        }
        if self.flag("optimizer.params.nesterov")
            && (self.number("optimizer.params.momentum") == 0.0
                || self.number("optimizer.params.dampening") != 0.0)
        {
            let why = "needs a momentum, and no dampening";
            self.unsupported("optimizer.params.nesterov", why, "add \"momentum\", or remove it");
        }
    }

    fn scheduler(&mut self) {
        if self.text("scheduler.type") != Some("OneCycleLR") {
            return;
        }
        let given = |rules: &Self, name: &str| rules.number(&format!("scheduler.params.{name}")) > 0.0;
        let by_epochs = given(self, "epochs") && given(self, "steps_per_epoch");
        if !(given(self, "total_steps") || by_epochs) {
            let why = "nothing says how many steps there are";
            self.missing(
                "scheduler.params.total_steps",
                why,
                "add \"total_steps\", or \"epochs\" and \"steps_per_epoch\"",
            );
        }
    }

    fn zero(&mut self) {
        let stage = self.stage();
        if self.flag("sparse_gradients") && stage > 0 {
            let why = format!(
                "has no effect in stage {stage}: each rank reduces its own part of a whole table there, as in DeepSpeed, whose \
                 stages 1 to 3 leave the key aside too"
            );
            self.no_effect("sparse_gradients", why, "remove it, or set zero_optimization.stage to 0");
        }
        let scaled = self.flag("prescale_gradients") || self.number("gradient_predivide_factor") != 1.0;
        if stage >= 2 && self.flag("zero_optimization.reduce_scatter") && scaled {
            let path = if self.flag("prescale_gradients") {
                "prescale_gradients"
            } else {
                "gradient_predivide_factor"
            };
            let why = format!("cannot be combined with reduce_scatter in ZeRO stage {stage}");
            self.unsupported(
                path,
                why,
                "write \"reduce_scatter\": false in `zero_optimization`, or remove it",
            );
        }
        let shards = self.number("zero_optimization.mics_shard_size");
        let partitions = self.number("zero_optimization.zero_hpz_partition_size");
        let stage_3_only = [
            ("zero_hpz_partition_size", partitions > 1.0),
            ("zero_quantized_weights", self.flag("zero_optimization.zero_quantized_weights")),
            (
                "zero_quantized_nontrainable_weights",
                self.flag("zero_optimization.zero_quantized_nontrainable_weights"),
            ),
            ("zero_quantized_gradients", self.flag("zero_optimization.zero_quantized_gradients")),
            ("mics_shard_size", shards > 0.0),
        ];
        if stage != 3 {
            for (name, _) in stage_3_only.into_iter().filter(|(_, given)| *given) {
                let why = format!("has an effect in stage 3 only, and the stage is {stage}");
                self.no_effect(&format!("zero_optimization.{name}"), why, "write \"stage\": 3, or remove it");
            }
        } else if self.flag("zero_optimization.zero_quantized_gradients")
            && !self.flag("zero_optimization.reduce_scatter")
        {
            let why = "needs reduce_scatter";
            self.unsupported(
                "zero_optimization.zero_quantized_gradients",
                why,
                "remove \"reduce_scatter\": false",
            );
        }
    }

    fn offload(&mut self) {
        let stage = self.stage();
        for section in ["offload_param", "offload_optimizer"] {
            let section = format!("zero_optimization.{section}");
            let device = self.text(&format!("{section}.device")).unwrap_or("none").to_owned();
            if device == "none" {
                continue;
            }
            if device == "nvme" && self.text(&format!("{section}.nvme_path")).is_none_or(str::is_empty) {
                let help = "add \"nvme_path\": \"/path/on/the/disk\"";
                self.unsupported(&format!("{section}.device"), "\"nvme\" needs `nvme_path`", help);
            }
            if section.ends_with("param") && stage != 3 {
                let why = format!("has an effect in stage 3 only, and the stage is {stage}");
                self.no_effect(&section, why, "write \"stage\": 3, or remove it");
            } else if stage == 0 {
                self.no_effect(
                    &section,
                    "has an effect with ZeRO only, and the stage is 0",
                    "write \"stage\": 1, 2 or 3",
                );
            } else if device == "nvme" && stage != 3 {
                let why = format!("\"nvme\" works in stage 3 only, and the stage is {stage}");
                self.unsupported(
                    &format!("{section}.device"),
                    why,
                    "write \"stage\": 3, or \"device\": \"cpu\"",
                );
            }
            if self.number("zero_optimization.mics_shard_size") > 0.0 && stage == 3 {
                self.unsupported(
                    &format!("{section}.device"),
                    "MiCS cannot be combined with offload",
                    "remove one of the two",
                );
            }
        }
        let ratio_path = "zero_optimization.offload_optimizer.ratio";
        if lookup(self.full, ratio_path).is_some() && self.number(ratio_path) < 1.0 && stage != 3 {
            let why = format!("a ratio below 1 works in stage 3 only, and the stage is {stage}");
            self.unsupported(ratio_path, why, "write \"stage\": 3, or remove it");
        }
    }

    fn pipeline(&mut self) {
        let stage = self.stage();
        if self.number("pipeline.stages") > 1.0 && stage >= 2 {
            let why = format!("ZeRO stage {stage} cannot be combined with pipeline parallelism");
            self.unsupported("zero_optimization.stage", why, "write \"stage\": 1 or 0");
        }
        let asked = Asked {
            stages: NonZeroUsize::MIN,
            partition: self.text("pipeline.partition").unwrap_or("best"),
            schedule: self.text("pipeline.schedule").unwrap_or("1f1b"),
            micro_batches: 1,
        };
        for error in [asked.kind().err(), asked.method().err()].into_iter().flatten() {
            let PipelineError::Key { key, why } = error else { continue };
            self.report.push(self.places.error(Code::NotAChoice, key, why, ""));
        }
    }

    /// What does not run where ranks hold different parts of the model, or of a sequence.
    fn spread(&mut self) {
        let spread = |key: &str| self.number(key) > 1.0;
        let [pipe, sequence, tensor, expert] = [
            "pipeline.stages",
            "sequence_parallel_size",
            "tensor_parallel.autotp_size",
            "expert_parallel.autoep_size",
        ]
        .map(spread);
        let in_shards = self.stage() == 3 && self.number("zero_optimization.mics_shard_size") > 0.0;
        if in_shards && (sequence || tensor || expert) {
            let why = "on a mesh, state is spread over all ranks that hold the same slices";
            self.unsupported("zero_optimization.mics_shard_size", why, "remove it");
        }
        let one_bit = self.text("optimizer.type").is_some_and(|name| ONE_BIT.contains(&name));
        if one_bit && (pipe || sequence || tensor || expert) {
            let why = "a 1-bit optimizer needs the same whole model on all ranks, and whole sequences";
            let help =
                "remove pipeline stages, shared sequences, tensor slices and spread experts, or use AdamW";
            self.unsupported("optimizer.type", why, help);
        }
        if tensor && self.text("optimizer.type") == Some("Muon") {
            let why = "Muon needs whole matrices, and ranks hold slices of them";
            self.unsupported("optimizer.type", why, "remove tensor slices, or use AdamW");
        }
        let token_drop = "data_efficiency.data_routing.random_ltd.enabled";
        if self.flag(token_drop) && (pipe || sequence || tensor || expert) {
            let why = "a layer that drops tokens needs whole sequences, and one rank that has all of it";
            let help = "remove pipeline stages, shared sequences, tensor slices and spread experts, or do not drop tokens";
            self.unsupported(token_drop, why, help);
        }
        let has_layout = lookup(self.full, "sparse_attention").is_some_and(Value::is_object);
        if has_layout && sequence {
            let why = "a layout of blocks is of whole sequences, and ranks have parts of them";
            self.unsupported("sparse_attention", why, "remove it, or sequence_parallel_size");
        }
        if has_layout && self.flag(token_drop) {
            let why = "a layout of blocks is of all tokens of a sequence, and layers see some";
            self.unsupported("sparse_attention", why, "remove it, or do not drop tokens");
        }
        let compressing = self.compressing();
        if let Some(technique) = &compressing {
            let key = format!("compression_training.{technique}.shared_parameters.enabled");
            if pipe || tensor || expert {
                let why = "compresses whole weights, and ranks hold parts of the model";
                let help = "remove pipeline stages, tensor slices and spread experts, or do not compress";
                self.unsupported(&key, why, help);
            }
            if one_bit {
                let why = "all ranks compress the same weights, and those of a 1-bit optimizer may differ between its exchanges";
                self.unsupported(&key, why, "use AdamW, or do not compress");
            }
            if self.flag("zero_optimization.zero_quantized_weights") {
                let why = "compresses exact weights, and zero_quantized_weights gathers rounded ones";
                self.unsupported(&key, why, "remove one of the two");
            }
        }
        let quantizes = self.flag("compression_training.weight_quantization.shared_parameters.enabled");
        if self.flag("eigenvalue.enabled") && quantizes {
            let why = "does not stretch the periods of compression_training.weight_quantization, which follow from the step alone";
            self.unsupported("eigenvalue.enabled", why, "remove it");
        }
        if self.flag("eigenvalue.enabled") && (pipe || tensor || expert) {
            let why = "measures whole blocks, and ranks hold parts of them";
            self.unsupported("eigenvalue.enabled", why, "remove it");
        }
    }

    fn activations(&mut self) {
        if self.flag("activation_checkpointing.contiguous_memory_optimization") {
            let path = "activation_checkpointing.contiguous_memory_optimization";
            if !self.flag("activation_checkpointing.partition_activations") {
                self.unsupported(
                    path,
                    "needs `partition_activations`",
                    "add \"partition_activations\": true",
                );
            }
            if self.number("activation_checkpointing.number_checkpoints") == 0.0 {
                self.unsupported(
                    path,
                    "needs `number_checkpoints`",
                    "add \"number_checkpoints\": calls per forward pass",
                );
            }
        }
    }

    fn gradient_accumulation_type(&mut self) {
        let Some(accumulation) = self.text("data_types.grad_accum_dtype").map(str::to_owned) else { return };
        if self.stage() > 0 {
            return;
        }
        let model = match (self.flag("fp16.enabled"), self.flag("bf16.enabled")) {
            (true, _) => "fp16",
            (_, true) => "bf16",
            _ => "fp32",
        };
        let (fits, instead) = match model {
            "bf16" => (accumulation == "fp32", "fp32"),
            _ => (accumulation == model, model),
        };
        if !fits {
            let why = format!(
                "without ZeRO, {model} training accumulates gradients in {instead}, not in {accumulation}"
            );
            self.unsupported("data_types.grad_accum_dtype", why, format!("write \"{instead}\", or use ZeRO"));
        }
    }

    fn elasticity(&mut self) {
        if !self.flag("elasticity.enabled") {
            return;
        }
        for name in ["max_train_batch_size", "micro_batch_sizes"] {
            let path = format!("elasticity.{name}");
            if !self.places.is_given(&path) {
                self.missing(&path, "required when elasticity is enabled", format!("add \"{name}\""));
            }
        }
        let (least, most) = (self.number("elasticity.min_gpus"), self.number("elasticity.max_gpus"));
        if least > most {
            let why = format!("min_gpus {least} is larger than max_gpus {most}");
            self.conflict("elasticity.min_gpus", why, "exchange them");
        }
        let micros =
            lookup(self.full, "elasticity.micro_batch_sizes").and_then(Value::as_array).map_or(0, Vec::len);
        if micros == 0 || micros > MAX_MICRO_BATCH_SIZES {
            let why = format!("expected 1 to {MAX_MICRO_BATCH_SIZES} sizes, found {micros}");
            self.report.push(self.places.error(Code::OutOfRange, "elasticity.micro_batch_sizes", why, ""));
        }
        match elasticity_version(self.full) {
            Some("0.1") if self.number("elasticity.model_parallel_size") > 1.0 => {
                let why = "elasticity version 0.1 does not know model parallelism";
                self.conflict("elasticity.model_parallel_size", why, "write \"version\": 0.2");
            }
            Some(_) => {}
            None => {
                let why = "there are versions 0.1 and 0.2";
                self.report.push(self.places.error(
                    Code::NotAChoice,
                    "elasticity.version",
                    why,
                    "write 0.1 or 0.2",
                ));
            }
        }
        if self.flag("elasticity.ignore_non_elastic_batch_info") {
            return;
        }
        for name in ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"] {
            if self.places.is_given(name) && self.full.get(name).is_some_and(|value| !value.is_null()) {
                let why = "elasticity chooses the batch sizes, so this one would not be used";
                let help = "remove it, or add \"ignore_non_elastic_batch_info\": true to `elasticity`";
                self.conflict(name, why, help);
            }
        }
    }

    /// The first technique of `compression_training` that is on.
    fn compressing(&self) -> Option<&'static str> {
        let is_on =
            |name: &&&str| self.flag(&format!("compression_training.{name}.shared_parameters.enabled"));
        TECHNIQUES.iter().find(is_on).copied()
    }

    fn compression(&mut self) {
        for name in TECHNIQUES {
            let section = format!("compression_training.{name}");
            let snip = self.text(&format!("{section}.shared_parameters.method")) == Some("snip_momentum");
            let groups = format!("{section}.different_groups");
            if self.flag(&format!("{section}.shared_parameters.enabled"))
                && !snip
                && !self.places.is_given(&groups)
            {
                let why = "required when the technique is enabled";
                self.missing(
                    &groups,
                    why,
                    "add at least one group: {\"name\": {\"params\": {…}, \"modules\": […]}}",
                );
            }
        }
        let heads = "compression_training.head_pruning.shared_parameters";
        if self.flag(&format!("{heads}.enabled")) && self.number(&format!("{heads}.num_heads")) == 0.0 {
            let why = "required when head pruning is enabled";
            self.missing(&format!("{heads}.num_heads"), why, "add \"num_heads\": attention heads per layer");
        }
        let sparse = "compression_training.sparse_pruning.shared_parameters";
        let (start, end) = (format!("{sparse}.schedule_offset"), format!("{sparse}.schedule_offset_end"));
        let end_given = lookup(self.full, &end).is_some_and(|value| !value.is_null());
        if end_given && self.number(&end) < self.number(&start) {
            let why = format!(
                "pruning would end at step {} before it starts at step {}",
                self.number(&end),
                self.number(&start)
            );
            self.conflict(&end, why, "write a later step");
        }
    }

    /// Curves lie below the folder that is named for them.
    fn monitors(&mut self) {
        for section in ["tensorboard", "csv_monitor"] {
            let path = format!("{section}.job_name");
            let Some(name) = self.text(&path).map(str::to_owned) else { continue };
            let stays = |part| matches!(part, Component::Normal(_) | Component::CurDir);
            if self.flag(&format!("{section}.enabled")) && !Path::new(&name).components().all(stays) {
                let why = format!("{name:?} leads out of `{section}.output_path`");
                let help = "write a plain name here, and the folder in `output_path`";
                self.report.push(self.places.error(Code::OutOfRange, &path, why, help));
            }
        }
    }
}

/// What `compression_training` can do to modules.
const TECHNIQUES: [&str; 6] = [
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
];

/// The version of the elasticity algorithm, written as a number or a string.
pub(crate) fn elasticity_version(full: &Map<String, Value>) -> Option<&'static str> {
    let version = match lookup(full, "elasticity.version")? {
        Value::String(text) => text.parse().ok()?,
        other => other.as_f64()?,
    };
    [(0.1, "0.1"), (0.2, "0.2")].into_iter().find(|(number, _)| *number == version).map(|(_, name)| name)
}
