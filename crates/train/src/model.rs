//! The model that a recipe names.

use std::path::{Path, PathBuf};

use ferrospeed_comm::Mesh;
use ferrospeed_config::DataType;
use ferrospeed_models::adapter::AdapterFiles;
use ferrospeed_models::config::{read_config, with_dropout};
use ferrospeed_models::decoder::{FeedForward, MlpChunks, Spread};
use ferrospeed_models::gguf::is_gguf;
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, DecoderConfig, ModelConfig, ModelError, WindowRule};
use ferrospeed_nn::moe::ExpertRanks;
use ferrospeed_nn::sparse_attention::SparseAttention;
use ferrospeed_nn::tensor_parallel::{Between, Slices};
use ferrospeed_nn::{Parameters, SequenceMethod, Stages};
use ferrospeed_pipeline::partition::Measured;
use ferrospeed_tensor::Param;
use ferrospeed_text::Codec;
use serde_json::Value;

use crate::adapter::Asked;
use crate::error::Result;
use crate::layer_reduction::{FirstWeights, LayerReduction};
use crate::recipe::{ModelRecipe, Recipe};

/// A model and where its first weights come from.
pub(crate) struct BuiltModel {
    pub(crate) decoder: Decoder,
    /// Its Hugging Face `config.json`.
    pub(crate) config: Value,
    /// The weights to start from; `None` starts from the initialisers.
    pub(crate) weights: Option<FirstWeights>,
    /// The adapter to start from.
    pub(crate) adapter: Option<AdapterFiles>,
}

/// A model's configuration, read and understood.
pub(crate) struct ModelPlan {
    json: Value,
    config: DecoderConfig,
    /// Where it is a student: from which layers of its teacher it starts.
    teacher: Option<(LayerReduction, DecoderConfig)>,
}

impl ModelRecipe {
    /// Whether it says which model; [`Recipe::problems`] tells when it does not.
    pub(crate) fn is_clear(&self) -> bool {
        let known = self.preset.as_ref().is_none_or(|preset| Preset::of_name(preset).is_ok());
        let given = [self.preset.is_some(), self.path.is_some(), self.config.is_some()];
        known && given.iter().filter(|&&given| given).count() == 1
    }

    /// How many tokens feed-forward layers take at a time.
    pub fn mlp_chunks(&self) -> MlpChunks {
        match self.mlp_chunk {
            None => MlpChunks::Automatic,
            Some(0) => MlpChunks::Whole,
            Some(tokens) => MlpChunks::Tokens(usize::try_from(tokens).unwrap_or(usize::MAX)),
        }
    }

    /// The folder that `path` or `config` lies in, where a tokenizer may lie too.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        let place = self.path.as_ref().or(self.config.as_ref())?;
        if place.is_dir() { Some(place.clone()) } else { place.parent().map(Path::to_path_buf) }
    }
}

/// The ranks of a mesh that hold parts of a recipe's model. All ranks call it together.
fn spread(recipe: &Recipe, mesh: Option<&Mesh>) -> Result<Spread> {
    let (sizes, Some(mesh)) = (recipe.mesh(), mesh) else { return Ok(Spread::default()) };
    let slices = match sizes.tensor.get() {
        1 => None,
        _ => Some(Slices::over(&mesh.tensor()?, recipe.between_slices())),
    };
    let experts = match sizes.expert.get() {
        1 => None,
        ranks => Some(ExpertRanks::from(&mesh.expert(ranks, recipe.expert_order())?.expert)),
    };
    Ok(Spread { slices, experts })
}

/// Freezes what a recipe says is not trained; every pattern that means nothing is a line.
fn freeze(recipe: &Recipe, parameters: &Parameters) -> Vec<String> {
    let patterns = &recipe.model.frozen;
    let mut problems: Vec<String> = Vec::new();
    for pattern in patterns.iter().filter(|pattern| parameters.freeze(pattern) == 0) {
        let some: Vec<&str> = parameters.names().into_iter().take(4).collect();
        problems.push(format!(
            "model.frozen: '{pattern}' is the name of no parameter; there are {} …, and * stands for anything",
            some.join(", ")
        ));
    }
    if !patterns.is_empty() && !parameters.as_slice().iter().any(Param::is_trainable) {
        problems.push("model.frozen: leaves nothing to train".to_owned());
    }
    problems
}

/// Why a model cannot be divided into the stages that a recipe asks for. What is wrong with its configuration otherwise is
/// told elsewhere.
fn cannot_be_staged(recipe: &Recipe, decoder: &Decoder) -> Option<String> {
    let (config, _) = recipe.config().ok().filter(|_| recipe.stages().get() > 1)?;
    // Layers are measured by ranks: here it is enough that there are some for every stage.
    let alike =
        vec![Measured { seconds: 1.0, state_bytes: 1.0, activation_bytes: 1.0 }; decoder.layers().len()];
    let divided = ferrospeed_engine::divide(&config, recipe.stages(), decoder, Some(&alike));
    divided.err().map(|error| error.to_string())
}

/// The layouts of attention that a recipe asks for, or why its data cannot have them. What is wrong with the section itself is told
/// with the configuration.
fn sparse_attention(recipe: &Recipe) -> Result<Option<SparseAttention>, Option<String>> {
    let (config, _) = recipe.config().map_err(|_| None)?;
    let kind = ferrospeed_engine::sparse_attention(&config).map_err(|_| None)?;
    if kind.is_some() && recipe.data.documents_are_apart() {
        let why = "sparse_attention: a layout of blocks is of sequences that are one text, and documents that are apart (data.documents) are not; leave out one of the two";
        return Err(Some(why.to_owned()));
    }
    Ok(kind.map(|kind| kind.with_seed(recipe.seed)))
}

/// The Hugging Face configuration of a recipe's model.
fn hugging_face(recipe: &Recipe, vocabulary: Option<u64>) -> Result<Value> {
    let model = &recipe.model;
    if let Some(folder) = model.path.as_ref().or(model.config.as_ref()) {
        let config = read_config(folder)?;
        return Ok(match model.dropout {
            Some(share) => with_dropout(config, share),
            None => config,
        });
    }
    preset(model, recipe.data.sequence, vocabulary.unwrap_or(256))
}

fn preset(model: &ModelRecipe, sequence: u64, data_vocabulary: u64) -> Result<Value> {
    let preset = Preset::of_name(model.preset.as_deref().unwrap_or("gpt2"))?;
    Ok(preset.config(&PresetSizes {
        layers: model.layers,
        width: model.width,
        heads: model.heads,
        vocabulary: model.vocabulary.unwrap_or(data_vocabulary),
        sequence,
        dropout: model.dropout.unwrap_or(0.0),
    }))
}

impl ModelPlan {
    /// Reads the configuration. `vocabulary` is what the data's tokenizer has, for presets that do not say.
    pub(crate) fn read(recipe: &Recipe, vocabulary: Option<u64>) -> Result<ModelPlan, Vec<String>> {
        let key = match (&recipe.model.path, &recipe.model.config) {
            (Some(_), _) => "model.path",
            (_, Some(_)) => "model.config",
            _ => "model",
        };
        if let Some(file) = recipe.model.path.as_ref().filter(|path| is_gguf(path)) {
            return Err(vec![format!(
                "model.path: {0} is a GGUF file, whose weights are of few bits; write them whole, `ferrospeed model convert {0} DIR`, and train that",
                file.display()
            )]);
        }
        let json = hugging_face(recipe, vocabulary).map_err(|error| vec![format!("{key}: {error}")])?;
        let parsed = ModelConfig::from_value(&json, WindowRule::default())
            .map_err(|error| vec![format!("{key}: {error}")])?;
        match parsed {
            ModelConfig::Decoder(config) => match LayerReduction::of(recipe).map_err(|why| vec![why])? {
                None => Ok(ModelPlan { json, config: *config, teacher: None }),
                Some(reduction) => {
                    let (json, student) = reduction.student(&json, &config).map_err(|why| vec![why])?;
                    Ok(ModelPlan { json, config: student, teacher: Some((reduction, *config)) })
                }
            },
            _ => Err(vec![format!("{key}: only causal language models are trained by recipes")]),
        }
    }

    /// How many tokens it knows.
    pub(crate) fn vocabulary(&self) -> u64 {
        self.config.vocab as u64
    }

    /// The channels of its residual stream.
    pub(crate) fn width(&self) -> u64 {
        self.config.width as u64
    }

    /// The type of its weights, where its `config.json` says it.
    pub(crate) fn dtype(&self) -> Option<String> {
        let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| self.json.get(*key)?.as_str());
        dtype.map(str::to_owned)
    }

    /// Builds the model, in slices where the mesh has ranks for them, and checks that it fits the data, and weights that it is
    /// to start from where they are opened; every problem is a line.
    pub(crate) fn build(
        self,
        recipe: &Recipe,
        codec: Option<&Codec>,
        mesh: Option<&Mesh>,
        opens_weights: bool,
    ) -> Result<BuiltModel, Vec<String>> {
        let mut problems = self.misfits(recipe, codec);
        let undivided = self.cannot_be_spread(recipe);
        if !undivided.is_empty() {
            problems.extend(undivided);
            return Err(problems);
        }
        let mut json = self.json;
        if recipe.model.preset.is_some() {
            json["bos_token_id"] = codec.and_then(Codec::begin_token).into();
            json["eos_token_id"] = codec.and_then(Codec::end_token).into();
        }
        let asked = Asked::of(recipe).map_err(|problem| [&problems[..], &[problem]].concat())?;
        let told = |error: &dyn std::fmt::Display| vec![format!("model: {error}")];
        let built = spread(recipe, mesh).map_err(|error| told(&error)).and_then(|spread| match &asked {
            Some(asked) => asked.build(self.config, &spread),
            None => Decoder::spread(self.config, &spread).map_err(|error| told(&error)),
        });
        let mut decoder = match built {
            Ok(decoder) => decoder,
            Err(found) => {
                problems.extend(found);
                return Err(problems);
            }
        };
        problems.extend(freeze(recipe, decoder.parameters()));
        if asked.is_some() && self.teacher.is_some() {
            problems.push("adapter: a student of fewer layers (compression_training.layer_reduction) learns with all its weights; leave out one of the two".to_owned());
        }
        decoder.set_activation_checkpointing(recipe.model.activation_checkpointing);
        decoder.set_mlp_chunks(recipe.model.mlp_chunks());
        if let Some(training) = &recipe.training {
            decoder.set_training_loss(training.loss_options());
            decoder.set_embedding_noise(training.embedding_noise());
        }
        match sparse_attention(recipe) {
            Ok(kind) => decoder.set_sparse_attention(kind.as_ref()),
            Err(problem) => problems.extend(problem),
        }
        problems.extend(cannot_be_staged(recipe, &decoder));
        let weights = recipe.model.path.as_ref().filter(|_| opens_weights).and_then(|folder| {
            let opened = WeightFiles::open_directory(folder)
                .and_then(|weights| FirstWeights::of(weights, &decoder, self.teacher));
            opened.map_err(|error| problems.push(format!("model.path: {error}"))).ok()
        });
        let adapter = asked.and_then(|asked| asked.files);
        if problems.is_empty() {
            Ok(BuiltModel { decoder, config: json, weights, adapter })
        } else {
            Err(problems)
        }
    }

    fn misfits(&self, recipe: &Recipe, codec: Option<&Codec>) -> Vec<String> {
        let mut problems = Vec::new();
        let vocabulary = self.vocabulary();
        if let Some(codec) = codec.filter(|codec| codec.vocabulary() > vocabulary) {
            let whose = codec.path().map_or("bytes".into(), |path| path.display().to_string());
            problems.push(format!(
                "model: a vocabulary of {vocabulary} does not hold the {} tokens of {whose}",
                codec.vocabulary()
            ));
        }
        // Ids of bytes would train a model of words on nonsense, without an error.
        let said = recipe.data.tokenizer.is_some() || recipe.model.preset.is_some();
        if matches!(codec, Some(Codec::Bytes)) && vocabulary != Codec::Bytes.vocabulary() && !said {
            problems.push(format!(
                "data.tokenizer: a model of {vocabulary} tokens does not read bytes, and there is no tokenizer.json \
                 beside it; name one, or say \"bytes\""
            ));
        }
        let slices = recipe.mesh().tensor.get() as u64;
        if recipe.between_slices() == Between::OwnTokens && !recipe.data.sequence.is_multiple_of(slices) {
            problems.push(format!(
                "data.sequence: {} tokens cannot be shared by {slices} ranks alike, as tensor_parallel.sequence_parallel asks; use a multiple of {slices}",
                recipe.data.sequence
            ));
        }
        if recipe.between_slices() == Between::OwnTokens && slices > 1 && recipe.mesh().sequence.get() > 1 {
            let why = "tensor_parallel.sequence_parallel: ranks that share sequences (sequence_parallel_size) have tokens of their own already; leave out one of the two";
            problems.push(why.to_owned());
        }
        if recipe.data.sequence > self.config.max_tokens as u64 {
            problems.push(format!(
                "data.sequence: {} is longer than the model's {} positions",
                recipe.data.sequence, self.config.max_tokens
            ));
        }
        let chunk = recipe.model.mlp_chunk.unwrap_or(0);
        if chunk > 0 && matches!(self.config.feed_forward, FeedForward::Mixture(_)) {
            problems.push(format!(
                "model.mlp_chunk: experts take all tokens that are routed to them, not {chunk} at a time; leave it out for a mixture of experts"
            ));
        }
        problems.extend(self.cannot_share_sequences(recipe));
        problems.extend(self.cannot_drop_tokens(recipe));
        problems
    }

    /// Why layers of this model cannot drop tokens, where they are to.
    fn cannot_drop_tokens(&self, recipe: &Recipe) -> Option<String> {
        let (config, _) = recipe.config().ok()?;
        // What is wrong with the section itself is told with the configuration.
        let schedule = ferrospeed_engine::random_ltd(&config).ok()??;
        let why = if let Err(why) = schedule.fits(self.config.layers) {
            why
        } else if matches!(self.config.feed_forward, FeedForward::Mixture(_)) {
            "the balance of experts is measured over all tokens; leave it out for a mixture of experts"
                .to_owned()
        } else if recipe.data.documents_are_apart() {
            "documents that are apart (data.documents) fill their sequences; leave out one of the two"
                .to_owned()
        } else {
            return None;
        };
        Some(format!("data_efficiency.data_routing.random_ltd: {why}"))
    }

    /// Why ranks cannot hold slices or experts of this model, where they are to.
    fn cannot_be_spread(&self, recipe: &Recipe) -> Vec<String> {
        let (sizes, between) = (recipe.mesh(), recipe.between_slices());
        let mut problems = Vec::new();
        let mut told = |key: &str, checked: Result<(), ModelError>| {
            problems.extend(checked.err().map(|error| format!("{key}: {error}")));
        };
        told("tensor_parallel.autotp_size (--tp)", self.config.check_slices(sizes.tensor.get(), between));
        told("expert_parallel.autoep_size (--ep)", self.config.check_experts(sizes.expert.get()));
        if sizes.expert.get() > 1 && sizes.tensor.get() > 1 && between == Between::OwnTokens {
            problems.push(
                "tensor_parallel.sequence_parallel: ranks with tokens of their own hold whole experts, which expert_parallel.autoep_size spreads; leave out one of the two".to_owned(),
            );
        }
        problems
    }

    /// Why ranks cannot share this model's sequences, where they are to.
    fn cannot_share_sequences(&self, recipe: &Recipe) -> Vec<String> {
        let (ranks, tokens) = (recipe.mesh().sequence.get() as u64, recipe.data.sequence);
        if ranks == 1 {
            return Vec::new();
        }
        let mut problems = Vec::new();
        let pieces =
            ranks.saturating_mul(if recipe.sequence_method() == SequenceMethod::Ring { 2 } else { 1 });
        if tokens < pieces {
            problems.push(format!(
                "data.sequence: {tokens} tokens cannot be cut into {pieces} pieces for {ranks} ranks \
                 (sequence_parallel_size)"
            ));
        }
        let balanced =
            matches!(&self.config.feed_forward, FeedForward::Mixture(mixture) if mixture.balance_loss > 0.0);
        if balanced && !tokens.is_multiple_of(2 * ranks) {
            problems.push(format!(
                "data.sequence: the balance of experts is taken over parts of one size; take a multiple of {} tokens",
                2 * ranks
            ));
        }
        problems
    }
}

/// A warning where a GPU computes attention by its plain kernels, which do not use its units for products.
pub(crate) fn slow_attention(model: &DecoderConfig, data_type: DataType) -> Option<String> {
    let (what, help) = if data_type == DataType::Fp32 {
        ("f32", "enable bf16 or fp16")
    } else if model.head_dim > 256 || !model.head_dim.is_multiple_of(8) {
        (
            "heads of more than 256 channels, or of a number that 8 does not divide,",
            "short sequences cost least",
        )
    } else {
        return None;
    };
    Some(format!(
        "attention with {what} has no fast kernels on a GPU yet, and can take most of a step; {help}"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_recipe_says_what_is_dropped_in_place_of_a_config() {
        let place = tempfile::tempdir().unwrap();
        let (model, path) = (place.path().join("config.json"), place.path().join("recipe.toml"));
        let gpt2 =
            json!({ "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 256 });
        std::fs::write(&model, gpt2.to_string()).unwrap();
        let text = format!(
            "name = \"a\"\nsteps = 1\n[model]\nconfig = {model:?}\n[data]\nsynthetic = 4000\nsequence = 16\n[ds_config]\ntrain_batch_size = 1\noptimizer.type = \"AdamW\"\n"
        );
        std::fs::write(&path, text).unwrap();
        let plan = |set: Option<&str>| {
            let overrides: Vec<String> = set.map(str::to_owned).into_iter().collect();
            let recipe = Recipe::load(&path, &overrides).unwrap();
            assert_eq!(recipe.problems(), [""; 0]);
            ModelPlan::read(&recipe, None).map_err(|problems| problems.join(", ")).unwrap()
        };
        for (set, expected) in
            [(None, 0.1), (Some("model.dropout=0"), 0.0), (Some("model.dropout=0.25"), 0.25)]
        {
            let config = plan(set).config;
            let dropped = [config.embedding_dropout, config.attention_dropout, config.residual_dropout];
            assert_eq!(dropped, [expected; 3], "{set:?}");
        }
        // What is exported and kept in checkpoints says it too, so that a run that goes on tells what has changed.
        let [before, now] = [None, Some("model.dropout=0")].map(|set| plan(set).json);
        assert_eq!(
            crate::architecture::changes(&before, &now),
            ["attn_pdrop: not given -> 0.0", "embd_pdrop: not given -> 0.0", "resid_pdrop: not given -> 0.0"]
        );
    }

    #[test]
    fn attention_that_a_gpu_has_no_fast_kernels_for_is_told() {
        let of = |config: Value| match ModelConfig::from_value(&config, WindowRule::default()) {
            Ok(ModelConfig::Decoder(config)) => config,
            other => panic!("{other:?}"),
        };
        let mut config =
            of(json!({ "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 32 }));
        assert_eq!(slow_attention(&config, DataType::Bf16), None);
        assert!(slow_attention(&config, DataType::Fp32).unwrap().contains("enable bf16"));
        for (channels, is_told) in [(192, false), (256, false), (264, true), (60, true)] {
            config.head_dim = channels;
            assert_eq!(slow_attention(&config, DataType::Fp16).is_some(), is_told, "{channels}");
        }
    }
}
