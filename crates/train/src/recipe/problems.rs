//! What is wrong with a recipe by itself, before any file it names is opened.

use ferrospeed_config::{BatchSizes, Config, Stage};
use ferrospeed_data::{SampleKind, TooLong};
use ferrospeed_nn::SequenceMethod;
use ferrospeed_tensor::ops::CrossEntropyOptions;
use ferrospeed_text::TrainOn;

use super::{DataRecipe, EvalRecipe, ModelRecipe, Recipe, ValidationRecipe};

// More than these is a slip of the finger. They are checked before anything of such a size is allocated or waited for, and
// products of them stay far from overflow.
const MAX_STEPS: u64 = 1_000_000_000_000;
const MAX_RANKS: u32 = 1 << 16;
const MAX_LAYERS: u64 = 1 << 14;
/// Of one dimension.
const MAX_SIZE: u64 = 1 << 24;
const MAX_TOKENS: u64 = 1 << 44;
const MAX_MICRO_BATCH_TOKENS: u64 = 1 << 31;

impl Recipe {
    /// Everything that is wrong with the recipe itself, before data and model are looked at.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.misread.clone();
        let mut refuse = |wrong: bool, problem: String| {
            if wrong {
                problems.push(problem);
            }
        };
        let name_is_plain = !self.name.is_empty()
            && self.name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        refuse(
            !name_is_plain || self.name.starts_with('.'),
            format!("name: '{}' must be letters, digits, '-', '_' and '.'", self.name),
        );
        refuse(
            !(1..=MAX_STEPS).contains(&self.steps),
            format!("steps: must be at least 1 and at most {MAX_STEPS}"),
        );
        let epochs = self.epochs.unwrap_or(1.0);
        refuse(
            !(epochs > 0.0 && epochs <= 1e6),
            format!("epochs: {epochs} must be more than 0 and at most 1000000"),
        );
        refuse(
            !(1..=MAX_RANKS).contains(&self.ranks),
            format!("ranks: must be at least 1 and at most {MAX_RANKS}"),
        );
        self.mesh().problems(self.ranks as usize, &mut refuse);
        refuse(
            self.gradient_norms_every > MAX_STEPS,
            format!(
                "gradient_norms_every: {} is more steps than a run may have; at most {MAX_STEPS}, or leave it out",
                self.gradient_norms_every
            ),
        );
        refuse(
            self.gradient_norms_every > 0 && self.stages().get() > 1,
            "gradient_norms_every: ranks of a model in stages hold different layers; leave out one of the two".into(),
        );
        if let Some(save) = &self.save {
            let no_rotation = save.keep_every.is_some() && save.keep_last.is_none();
            refuse(no_rotation, "save.keep_every: means nothing without save.keep_last: all stay".into());
            for (key, value) in [("save.keep_last", save.keep_last), ("save.keep_every", save.keep_every)] {
                refuse(value == Some(0), format!("{key}: must be at least 1; leave it out to keep all"));
            }
        }
        if let Some(sample) = &self.sample {
            let is_empty = sample.prompt.is_empty() || sample.prompts.iter().any(String::is_empty);
            refuse(is_empty, "sample.prompt: must not be empty".into());
            let usable = sample.temperature >= 0.0 && sample.temperature.is_finite();
            refuse(!usable, format!("sample.temperature: {} must be 0 or more", sample.temperature));
            let tokens = sample.tokens;
            refuse(tokens > MAX_SIZE, format!("sample.tokens: {tokens} is too many; at most {MAX_SIZE}"));
        }
        self.eval.problems(self.objective().measures(), self.validates(), &mut refuse);
        self.data.problems(&mut refuse);
        self.model.problems(&mut refuse);
        if let Some(adapter) = &self.adapter {
            adapter.problems(&mut refuse);
            refuse(
                !self.model.frozen.is_empty(),
                "model.frozen: with [adapter] all weights of the model stay as they are; leave it out".into(),
            );
        }
        if let Some(training) = &self.training {
            training.problems(&mut refuse);
            let mesh = self.mesh();
            let smooths = training.loss_options() != CrossEntropyOptions::default();
            refuse(
                smooths && mesh.tensor.get() > 1,
                "training.label_smoothing_factor, training.z_loss: no rank has whole logits with tensor_parallel.autotp_size (--tp); leave out one of the two".into(),
            );
            refuse(
                smooths && self.objective().name() != "next_token",
                format!(
                    "training.label_smoothing_factor, training.z_loss: belong to the next token, and the objective is {}; leave them out",
                    self.objective().name()
                ),
            );
            refuse(
                training.embedding_noise().is_some() && mesh.tensor.get().max(mesh.sequence.get()) > 1,
                "training.neftune_noise_alpha: ranks that share tokens would each add noise of their own; leave it out with --tp and --sp".into(),
            );
        }
        refuse(
            self.vocabulary_is_unknown(),
            "model.vocabulary: must be given, for token files do not say how many ids there are".into(),
        );
        problems.extend(self.objective_problems());
        // An error of the file itself is met again by the resolution.
        if let Ok((_, _, contradictions)) = self.unresolved() {
            problems.extend(contradictions);
        }
        match self.config() {
            Ok((config, _)) => {
                problems.extend(self.batch_problems(&config.batch));
                problems.extend(self.shard_problems(&config));
                problems.extend(self.spread_problems(&config));
                if self.epochs.is_some() && config.data_sampling.is_some() {
                    problems.push("epochs: a curriculum by metrics grants its own (data_efficiency.data_sampling.num_epochs); give steps".into());
                }
                if config.optimizer.is_none() {
                    problems.push("optimizer: nothing trains without one; add it to the ds_config, or [training] with a learning_rate, which has the AdamW of Hugging Face's Trainer".into());
                }
            }
            Err(error) => problems.push(error.to_string().replace('\n', "\n  ")),
        }
        problems
    }

    /// What of the batch sizes is a slip of the finger: a micro-batch lies in memory whole, and a step has to end.
    fn batch_problems(&self, batch: &BatchSizes) -> Vec<String> {
        let (micro, accumulation) = (batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps);
        let mut problems = Vec::new();
        let tokens = u128::from(micro.get()) * u128::from(self.data.sequence);
        if tokens > u128::from(MAX_MICRO_BATCH_TOKENS) {
            problems.push(format!(
                "train_micro_batch_size_per_gpu: {micro} sequences of {} tokens are {tokens} tokens at once; at most {MAX_MICRO_BATCH_TOKENS}",
                self.data.sequence
            ));
        }
        if accumulation.get() > MAX_SIZE {
            problems
                .push(format!("gradient_accumulation_steps: {accumulation} is too many; at most {MAX_SIZE}"));
        }
        problems
    }

    /// Into which shards the ranks cannot be cut; only stage 3 asks.
    fn shard_problems(&self, config: &Config) -> Vec<String> {
        let (ranks, zero) = (u64::from(self.ranks), &config.zero);
        if zero.stage != Stage::Parameters {
            return Vec::new();
        }
        let copied = Some(zero.hpz_partition_size).filter(|&size| size > 1 && size < ranks);
        let sizes = [("zero_hpz_partition_size", copied), ("mics_shard_size", zero.mics_shard_size)];
        let misfit = |(key, size): (&str, Option<u64>)| {
            let size = size.filter(|&size| !ranks.is_multiple_of(size))?;
            Some(format!(
                "zero_optimization.{key}: {ranks} ranks cannot be cut into shards of {size}; choose a divisor of the number of ranks"
            ))
        };
        sizes.into_iter().filter_map(misfit).collect()
    }

    /// What does not run where ranks hold different parts of the model or of its state, and the configuration alone does not
    /// tell. The engine refuses it too, but then ranks have begun, and an old run may be gone.
    fn spread_problems(&self, config: &Config) -> Vec<String> {
        let (mesh, zero, ranks) = (self.mesh(), &config.zero, u64::from(self.ranks));
        let [pipe, tensor] = [mesh.pipe, mesh.tensor].map(|size| size.get() > 1);
        let in_stage_3 = zero.stage == Stage::Parameters;
        let in_shards = in_stage_3 && zero.mics_shard_size.is_some();
        let copied = in_stage_3 && zero.hpz_partition_size > 1 && zero.hpz_partition_size < ranks;
        let in_ring = mesh.sequence.get() > 1 && self.sequence_method() == SequenceMethod::Ring;
        // A configuration that a run has written down names the default, too.
        let scheduled =
            self.given(["pipeline.schedule"])[0].as_ref().is_some_and(|schedule| schedule != "1f1b");
        let rules = [
            (
                scheduled && !pipe,
                "pipeline.schedule: the model is in one piece; give it stages (--pp, pipeline.stages), or leave the schedule out",
            ),
            (
                in_ring && self.data.documents_are_apart(),
                "data.documents: ranks of a ring attend over parts of sequences, in which documents (and samples, unless \"together\") are not told apart; use sequence_parallel_method \"ulysses\"",
            ),
            (
                copied && (in_shards || pipe || tensor),
                "zero_optimization.zero_hpz_partition_size: keeps a second copy of what is spread over all ranks; remove it, or mics_shard_size, pipeline stages and tensor slices",
            ),
        ];
        rules.into_iter().filter(|(is_so, _)| *is_so).map(|(_, why)| why.to_owned()).collect()
    }

    /// Whether something is only measured.
    fn validates(&self) -> bool {
        match &self.data.validation {
            ValidationRecipe::Share(share) => *share > 0.0,
            ValidationRecipe::Files(files) => !files.is_empty(),
        }
    }

    /// Whether ids can be held against the vocabulary: what is wrong with it by itself is told by itself.
    pub(crate) fn vocabulary_makes_sense(&self) -> bool {
        !self.vocabulary_is_unknown() && self.model.vocabulary != Some(1)
    }

    /// Whether nothing says how many ids there are: neither the data nor the model.
    fn vocabulary_is_unknown(&self) -> bool {
        let tokens = self.data.tokens.is_some() || self.data.megatron.is_some();
        tokens && self.model.preset.is_some() && self.model.vocabulary.is_none()
    }
}

impl EvalRecipe {
    fn problems(&self, measures: &[&str], validates: bool, refuse: &mut impl FnMut(bool, String)) {
        let compares = [
            ("keep_best", self.keep_best),
            ("patience", self.patience.is_some()),
            ("min_gain", self.min_gain.is_some()),
            ("measure", self.measure.is_some()),
        ];
        for (key, _) in compares.into_iter().filter(|(_, is_given)| *is_given) {
            refuse(self.every == 0, format!("eval.{key}: compares validations on the way; give eval.every"));
            refuse(!validates, format!("eval.{key}: nothing is validated; give data.validation"));
        }
        let is_idle =
            (self.min_gain.is_some() || self.measure.is_some()) && !self.keep_best && self.patience.is_none();
        refuse(
            is_idle,
            "eval: min_gain and measure belong to keep_best and patience; give one of these".into(),
        );
        refuse(
            self.patience == Some(0),
            "eval.patience: must be at least 1; leave it out to go on to the end".into(),
        );
        let is_sensible = self.min_gain.is_none_or(|gain| gain >= 0.0 && gain.is_finite());
        refuse(!is_sensible, "eval.min_gain: must be 0 or more".into());
        let measure = self.measure.as_deref().unwrap_or("loss");
        let known: Vec<&str> = std::iter::once("loss").chain(measures.iter().copied()).collect();
        refuse(
            !known.contains(&measure),
            format!(
                "eval.measure: '{measure}' is not measured by this objective; known are {}",
                known.join(", ")
            ),
        );
        refuse(
            self.at_start && !validates,
            "eval.at_start: nothing is validated; give data.validation".into(),
        );
    }
}

impl DataRecipe {
    fn problems(&self, refuse: &mut impl FnMut(bool, String)) {
        refuse(
            self.sequence < 2,
            format!("data.sequence: {} is too short to predict a next token", self.sequence),
        );
        refuse(
            self.sequence > MAX_SIZE,
            format!("data.sequence: {} is too long; at most {MAX_SIZE} tokens", self.sequence),
        );
        let synthetic = self.synthetic.unwrap_or(0);
        refuse(
            synthetic > MAX_TOKENS,
            format!("data.synthetic: {synthetic} is too many; at most {MAX_TOKENS} tokens"),
        );
        let lists = [
            ("text", &self.text),
            ("jsonl", &self.jsonl),
            ("parquet", &self.parquet),
            ("samples", &self.samples),
            ("tokens", &self.tokens),
            ("megatron", &self.megatron),
        ];
        let given: Vec<&str> = lists
            .iter()
            .filter(|(_, list)| list.is_some())
            .map(|(name, _)| *name)
            .chain(self.synthetic.map(|_| "synthetic"))
            .chain(self.hub.as_ref().map(|_| "hub"))
            .collect();
        if given.len() != 1 {
            let found = match &given[..] {
                [] => "there is none".to_owned(),
                several => format!("there are {}", several.join(" and ")),
            };
            let known = "text, jsonl, parquet, samples, hub, tokens, megatron and synthetic";
            refuse(true, format!("data: give one of {known}; {found}"));
        }
        for (name, list) in lists {
            let empty = list.as_ref().is_some_and(Vec::is_empty);
            refuse(empty, format!("data.{name}: names no file or folder"));
        }
        for (option, set, owner) in [
            ("extensions", !self.extensions.is_empty(), "text"),
            ("field", self.field.is_some(), "jsonl"),
            ("column", self.column.is_some(), "parquet"),
            ("token_type", self.token_type.is_some(), "tokens"),
            ("kind", self.kind.is_some(), "samples"),
            ("chat_template", self.chat_template.is_some(), "samples"),
            ("train_on", self.train_on.is_some(), "samples"),
            ("too_long", self.too_long.is_some(), "samples"),
        ] {
            // What data of the Hub is, is known when it is here.
            let misplaced = set && given.len() == 1 && ![owner, "hub"].contains(&given[0]);
            refuse(
                misplaced,
                format!("data.{option}: belongs to data.{owner}, not to data.{}", given.join("")),
            );
        }
        let is_text = ["text", "jsonl", "parquet", "samples", "hub"].iter().any(|name| given.contains(name));
        refuse(
            self.cache.is_some() && !given.is_empty() && !is_text,
            format!(
                "data.cache: belongs to text, jsonl, parquet and samples; data.{} needs none",
                given.join("")
            ),
        );
        refuse(
            self.tokenizer.is_some() && given == ["synthetic"],
            "data.tokenizer: synthetic data has no text".into(),
        );
        if let Some(kind) = &self.token_type {
            let known = ["u16", "u32"].contains(&kind.as_str());
            refuse(!known, format!("data.token_type: '{kind}' is not known; use u16 or u32"));
        }
        if let Some(documents) = &self.documents {
            let known = ["together", "apart"].contains(&documents.as_str());
            refuse(!known, format!("data.documents: '{documents}' is not known; use together or apart"));
        }
        self.sample_problems(refuse);
        let is_tokens = ["tokens", "megatron"].iter().any(|name| given.contains(name));
        refuse(
            self.end_token.is_some() && !given.is_empty() && !is_tokens,
            format!(
                "data.end_token: belongs to tokens and megatron; data.{} knows where documents end",
                given.join("")
            ),
        );
        refuse(
            self.end_token.is_some() && !self.documents_are_apart(),
            "data.end_token: belongs to data.documents = \"apart\"".into(),
        );
        match &self.validation {
            ValidationRecipe::Share(share) => refuse(
                !(0.0..1.0).contains(share),
                format!("data.validation: {share} is not a share in 0..1"),
            ),
            ValidationRecipe::Files(files) => {
                refuse(files.is_empty(), "data.validation: names no file or folder".into());
                refuse(
                    given == ["synthetic"],
                    "data.validation: synthetic data has no files; give a share".into(),
                );
            }
        }
    }
}

impl DataRecipe {
    /// Words about samples that are not known.
    fn sample_problems(&self, refuse: &mut impl FnMut(bool, String)) {
        let is_known = |word: &Option<String>, knows: fn(&str) -> bool| word.as_deref().is_none_or(knows);
        let words: [(&str, &Option<String>, fn(&str) -> bool, &str); 3] = [
            (
                "kind",
                &self.kind,
                |word| SampleKind::of_name(word).is_some(),
                "messages, sharegpt, alpaca, completion, text, preference or unpaired",
            ),
            ("train_on", &self.train_on, |word| TrainOn::of_name(word).is_some(), "assistant, last or all"),
            ("too_long", &self.too_long, |word| TooLong::of_name(word).is_some(), "cut, drop or split"),
        ];
        for (key, word, knows, known) in words {
            let said = word.as_deref().unwrap_or_default();
            refuse(!is_known(word, knows), format!("data.{key}: '{said}' is not known; use {known}"));
        }
    }
}

impl ModelRecipe {
    fn problems(&self, refuse: &mut impl FnMut(bool, String)) {
        let sources = [self.preset.is_some(), self.path.is_some(), self.config.is_some()];
        let given = sources.iter().filter(|&&given| given).count();
        refuse(given != 1, "model: give one of preset, path and config".into());
        if let Some(preset) = &self.preset {
            let known = ["gpt2", "llama"].contains(&preset.as_str());
            refuse(!known, format!("model.preset: '{preset}' is not known; use gpt2 or llama"));
        } else {
            let sizes = [self.layers, self.width, self.heads, self.vocabulary];
            let sized = sizes.iter().any(Option::is_some);
            refuse(sized, "model: layers, width, heads and vocabulary belong to a preset".into());
        }
        for (key, value) in [
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("vocabulary", self.vocabulary),
        ] {
            // Where there is one token, there is nothing to predict.
            let least = if key == "vocabulary" { 2 } else { 1 };
            let most = if key == "layers" { MAX_LAYERS } else { MAX_SIZE };
            let sensible = value.is_none_or(|value| (least..=most).contains(&value));
            refuse(!sensible, format!("model.{key}: must be in {least}..={most}"));
        }
        let chunk = self.mlp_chunk.unwrap_or(0);
        refuse(chunk > MAX_SIZE, format!("model.mlp_chunk: {chunk} is too many tokens; at most {MAX_SIZE}"));
        let share = self.dropout.is_none_or(|dropout| (0.0..1.0).contains(&dropout));
        refuse(!share, "model.dropout: must be in 0..1".into());
    }
}
