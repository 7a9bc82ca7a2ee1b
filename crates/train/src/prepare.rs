//! From a recipe to data and model that fit each other, or everything that keeps them from it.
//!
//! The command that starts the ranks does this first, so that mistakes are told once and text becomes tokens once;
//! each rank does it again and finds the work done.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrospeed_comm::Mesh;
use ferrospeed_data::{
    Admission, Counted, DataError, Rendering, SampleFiles, SampleKind, Sequences, Source, Tell, TokenType,
    TooLong, counts, unheard,
};
use ferrospeed_engine::refusals;
use ferrospeed_models::directory::{GENERATION_FILES, TOKENIZER_FILES, copy_file, copy_files};
use ferrospeed_text::{ChatTemplate, Codec, TrainOn};
use serde_json::Value;

use crate::curriculum;
use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::model::{BuiltModel, ModelPlan};
use crate::recipe::{DataRecipe, Recipe, ValidationRecipe};

/// Text up to this size is looked at even when the recipe has mistakes already; more would keep their author waiting.
const QUICK_TEXT_BYTES: u64 = 64 << 20;

/// Data and model of a run.
pub(crate) struct Prepared {
    pub(crate) sequences: Sequences,
    /// How text becomes tokens and back; `None` for data that was tokens from the start and names no tokenizer.
    pub(crate) codec: Option<Codec>,
    /// How much plain text a token of the tokenizer stands for.
    pub(crate) bytes_per_token: Option<f64>,
    /// When sequences come in, where the recipe has a curriculum by metrics.
    pub(crate) admission: Option<Admission>,
    pub(crate) model: BuiltModel,
    /// What is allowed and most likely not meant.
    pub(crate) warnings: Vec<String>,
}

/// Checks a recipe and all that it names, and turns text into tokens in the run's folder. `tell` hears how far that is.
///
/// Everything that is wrong is told together. Gives the `config.json` of the model.
pub fn check(recipe: &Recipe, path: &Path, folder: &RunFolder, tell: Tell<'_>) -> Result<Value> {
    prepare(recipe, path, folder, None, tell).map(|prepared| prepared.model.config)
}

/// The `config.json` of a recipe's model, or all that is wrong with the recipe apart from files of data and weights, which may
/// be on another machine.
pub fn model_config(recipe: &Recipe, path: &Path) -> Result<Value> {
    match Looked::at(recipe, None, Extent::Shape) {
        Looked { problems, model: Some(model), .. } if problems.is_empty() => Ok(model.config),
        Looked { problems, .. } => Err(TrainError::Recipe { path: path.to_path_buf(), problems }),
    }
}

/// All that [`check`] would find wrong before it reads any text, and the model's `config.json` where there is one.
pub fn problems(recipe: &Recipe) -> (Vec<String>, Option<Value>) {
    let Looked { mut problems, model, opened, .. } = Looked::at(recipe, None, Extent::Files);
    problems.extend(curriculum::admission(recipe, opened.as_ref().map(|opened| &opened.sequences)).1);
    (problems, model.map(|model| model.config))
}

/// The data of a recipe, whatever its weights and its curriculum are.
pub(crate) struct DataAlone {
    pub(crate) sequences: Sequences,
    /// The token that documents end with, where it is known.
    pub(crate) end_token: Option<i64>,
}

/// Opens the data of a recipe. Text becomes tokens in `cache`.
pub(crate) fn data_alone(recipe: &Recipe, path: &Path, cache: &Path, tell: Tell<'_>) -> Result<DataAlone> {
    let mut looked = Looked::at(recipe, None, Extent::Shape);
    if looked.problems.is_empty() && looked.opened.is_none() {
        looked.open(recipe, cache, tell);
    }
    if looked.stopped {
        return Err(DataError::Stopped.into());
    }
    let end_token = end_token(&recipe.data, looked.codec.as_ref());
    match looked.opened {
        Some(Opened { sequences, .. }) if looked.problems.is_empty() => {
            Ok(DataAlone { sequences, end_token })
        }
        _ => Err(TrainError::Recipe { path: path.to_path_buf(), problems: looked.problems }),
    }
}

/// The data of a recipe and its tokenizer, or the first thing that keeps them from being used.
pub(crate) fn samples_of(recipe: &Recipe) -> Result<(Source, Codec), String> {
    let Sources { train, problem, .. } = Sources::of(recipe);
    if let Some(problem) = recipe.problems().into_iter().chain(problem).next() {
        return Err(problem);
    }
    let source = train.ok_or("data: names no samples")?;
    let codec = codec(recipe, Some(&source))?.unwrap_or(Codec::Bytes);
    Ok((source, codec))
}

/// Why files of a recipe's data cannot be used on this machine, as far as their names and sizes show it.
pub fn unusable_data(recipe: &Recipe) -> Vec<String> {
    Sources::of(recipe).unusable()
}

/// Where tokens to train on come from, and those to validate on where they are apart; nothing where a recipe does not say it
/// clearly.
struct Sources {
    train: Option<Source>,
    validation: Option<Source>,
    /// Why samples cannot be rendered.
    problem: Option<String>,
}

impl Sources {
    fn of(recipe: &Recipe) -> Sources {
        let (train, problem) = match recipe.data.source(recipe) {
            Ok(train) => (train, None),
            Err(problem) => (None, Some(problem)),
        };
        let validation = match &recipe.data.validation {
            ValidationRecipe::Files(files) => train.as_ref().map(|source| source.with_paths(files.clone())),
            ValidationRecipe::Share(_) => None,
        };
        Sources { train, validation, problem }
    }

    fn unusable(&self) -> Vec<String> {
        let named = [&self.train, &self.validation].into_iter().flatten().flat_map(unusable);
        named.map(|problem| format!("data: {problem}")).collect()
    }
}

/// How much of a recipe is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// The recipe, its model's configuration, its tokenizer, and data that is made up.
    Shape,
    /// Also whether there are weights that fit the model, and data.
    Files,
}

/// What there is to see before text is read, which may take long. Every command that judges a recipe looks here, so that all say the same.
struct Looked {
    source: Option<Source>,
    validation: Option<Source>,
    codec: Option<Codec>,
    model: Option<BuiltModel>,
    /// Ids of tokens must be below it.
    vocabulary: Option<u64>,
    /// Data that is tokens already.
    opened: Option<Opened>,
    /// Whether files of data cannot be used.
    lacks_data: bool,
    /// Whether whoever was told how far text is said to stop.
    stopped: bool,
    problems: Vec<String>,
}

impl Looked {
    fn at(recipe: &Recipe, mesh: Option<&Mesh>, extent: Extent) -> Looked {
        let mut problems = recipe.problems();
        let sources = Sources::of(recipe);
        problems.extend(sources.problem.clone());
        let source = sources.train.as_ref();
        let codec = codec(recipe, source).map_err(|problem| problems.push(problem)).unwrap_or(None);
        let is_tokens = source.is_some_and(|source| !source.is_text());
        if recipe.sample.is_some() && codec.is_none() && is_tokens {
            problems.push("sample: tokens are no text; name data.tokenizer, or take [sample] away".into());
        }
        let plan = match recipe.model.is_clear() {
            true => ModelPlan::read(recipe, codec.as_ref().map(Codec::vocabulary)),
            false => Err(Vec::new()),
        };
        let plan = plan.map_err(|found| problems.extend(found)).ok();
        let vocabulary = plan.as_ref().map(ModelPlan::vocabulary).filter(|_| recipe.vocabulary_makes_sense());
        let built = plan.map(|plan| plan.build(recipe, codec.as_ref(), mesh, extent == Extent::Files));
        let model = built.and_then(|built| built.map_err(|found| problems.extend(found)).ok());
        let unusable = if extent == Extent::Files { sources.unusable() } else { Vec::new() };
        let lacks_data = !unusable.is_empty();
        problems.extend(unusable);
        if let Ok((config, _)) = recipe.config() {
            let refused = refusals(&config, model.as_ref().map(|model| model.decoder.parameters()));
            problems.extend(refused.iter().map(ToString::to_string));
        }
        let is_here = extent == Extent::Files || matches!(source, Some(Source::Synthetic { .. }));
        let (opened, stopped) = (None, false);
        let Sources { train: source, validation, .. } = sources;
        let mut looked =
            Looked { source, validation, codec, model, vocabulary, opened, lacks_data, stopped, problems };
        if is_tokens && is_here {
            // Tokens have no use for a cache.
            looked.open(recipe, Path::new(""), &mut unheard);
        } else {
            looked.count(recipe);
        }
        looked
    }

    /// Refuses a share for validation that leaves nothing to train on, where the data is here and its size tells it.
    fn count(&mut self, recipe: &Recipe) {
        let ValidationRecipe::Share(share) = &recipe.data.validation else { return };
        let makes_sense = !self.lacks_data && recipe.data.sequence > 1 && (0.0..1.0).contains(share);
        let source = self.source.as_ref().filter(|_| makes_sense);
        let Some(tokens) = source.and_then(|source| source.most_tokens(self.codec.as_ref())) else { return };
        if let Err(problem @ DataError::NothingToTrainOn { .. }) =
            counts(tokens, recipe.data.sequence, *share)
        {
            self.problems.push(format!("data: {problem}"));
            // It is told, and reading it would tell it again.
            self.lacks_data = true;
        }
    }

    /// Opens the data, where there is some that can be.
    fn open(&mut self, recipe: &Recipe, cache: &Path, tell: Tell<'_>) {
        // A length that makes no sense is told already.
        let Some(source) = self.source.as_ref().filter(|_| !self.lacks_data && recipe.data.sequence > 1)
        else {
            return;
        };
        let opened =
            open(recipe, source, self.validation.as_ref(), self.codec.as_ref(), cache, self.vocabulary, tell);
        match opened {
            Ok(opened) => self.opened = Some(opened),
            Err(DataError::Stopped) => self.stopped = true,
            Err(problem) => self.problems.push(format!("data: {problem}")),
        }
    }
}

/// Why data cannot be read, as far as its files show it by their names and sizes.
fn unusable(source: &Source) -> Vec<String> {
    let named = source.unusable();
    if !named.is_empty() || !source.is_text() {
        return named;
    }
    match source.text_bytes() {
        Ok(0) => vec!["the files are empty: there is no text in them".to_owned()],
        Ok(_) => Vec::new(),
        Err(error) => vec![error.to_string()],
    }
}

/// What [`check`] checks, for the run on a mesh.
pub(crate) fn prepare(
    recipe: &Recipe,
    path: &Path,
    folder: &RunFolder,
    mesh: Option<&Mesh>,
    tell: Tell<'_>,
) -> Result<Prepared> {
    let mut looked = Looked::at(recipe, mesh, Extent::Files);
    let is_quick = |source: &Source| source.text_bytes().is_ok_and(|bytes| bytes <= QUICK_TEXT_BYTES);
    if let Some(source) = looked.source.as_ref().filter(|source| source.is_text())
        && looked.codec.is_some()
        && (looked.problems.is_empty() || is_quick(source))
    {
        let cache = recipe.data.cache.clone().unwrap_or_else(|| folder.data());
        looked.open(recipe, &cache, tell);
    }
    if looked.stopped {
        return Err(DataError::Stopped.into());
    }
    let Looked { source: looked_source, opened, codec, model, mut problems, .. } = looked;
    let sequences = opened.as_ref().map(|opened| &opened.sequences);
    let (admission, found) = curriculum::admission(recipe, sequences);
    problems.extend(found);
    match (opened, model) {
        (Some(Opened { sequences, largest, bytes_per_token }), Some(model)) if problems.is_empty() => {
            let warnings = looks_like_bytes(codec.as_ref(), largest, model.decoder.config().vocab as u64);
            let left_out = admission.as_ref().and_then(curriculum::leaves_out);
            let samples =
                looked_source.as_ref().and_then(|source| samples_note(source, &sequences.counted()));
            let warnings = samples.into_iter().chain(warnings).chain(left_out).collect();
            Ok(Prepared { sequences, codec, bytes_per_token, admission, model, warnings })
        }
        _ => Err(TrainError::Recipe { path: path.to_path_buf(), problems }),
    }
}

/// What samples were found to be, and what became of them.
fn samples_note(source: &Source, counted: &[Counted]) -> Option<String> {
    let (Source::Samples(samples), Some(first)) = (source, counted.first()) else { return None };
    let kind = samples.kind().ok()?;
    let Counted { samples: count, too_long, dropped, tokens, trained, .. } = first;
    let way = samples.too_long.name();
    let long = match too_long {
        0 => String::new(),
        _ => format!("; {too_long} are longer than data.sequence (data.too_long = \"{way}\")"),
    };
    let left_out = if *dropped > 0 { format!("; {dropped} are left out") } else { String::new() };
    Some(format!(
        "data: {count} samples of the kind '{kind}': {tokens} tokens, of which {trained} are learnt{long}{left_out}"
    ))
}

/// Data that can be read.
struct Opened {
    sequences: Sequences,
    /// The largest token that was seen.
    largest: Option<i64>,
    bytes_per_token: Option<f64>,
}

fn open(
    recipe: &Recipe,
    source: &Source,
    validation: Option<&Source>,
    codec: Option<&Codec>,
    cache: &Path,
    vocabulary: Option<u64>,
    tell: Tell<'_>,
) -> Result<Opened, DataError> {
    let (data, length) = (&recipe.data, recipe.row_tokens());
    let end_token = end_token(data, codec);
    let codec = codec.unwrap_or(&Codec::Bytes);
    let train = source.open(codec, cache, tell)?;
    let is_words =
        matches!(source, Source::Text { .. }) && !matches!(codec, Codec::Bytes) && !train.is_empty();
    let bytes_per_token = match is_words {
        true => Some(source.text_bytes()? as f64 / train.len() as f64),
        false => None,
    };
    let sequences = match (validation, &data.validation) {
        (Some(validation), _) => Sequences::apart(train, validation.open(codec, cache, tell)?, length)?,
        // What is no share is told elsewhere.
        (None, ValidationRecipe::Share(share)) => {
            let share = Some(*share).filter(|share| (0.0..1.0).contains(share)).unwrap_or(0.0);
            Sequences::split(train, length, share)?
        }
        (None, ValidationRecipe::Files(_)) => Sequences::split(train, length, 0.0)?,
    };
    let sequences = vocabulary.map_or(sequences.clone(), |vocabulary| sequences.within(vocabulary));
    let sequences = match data.documents_are_apart() {
        true => sequences.by_documents(end_token)?,
        false => sequences,
    };
    let largest = sequences.check()?;
    Ok(Opened { sequences, largest, bytes_per_token })
}

/// The token that documents end with: the one that is named, else the tokenizer's.
fn end_token(data: &DataRecipe, codec: Option<&Codec>) -> Option<i64> {
    let named = data.end_token.map(|token| token as i64);
    named.or_else(|| codec.and_then(Codec::end_token).map(i64::from))
}

/// A warning where a model of words is trained on bytes: most of its vocabulary would never be seen.
fn looks_like_bytes(codec: Option<&Codec>, largest: Option<i64>, vocabulary: u64) -> Option<String> {
    let bytes = Codec::Bytes.vocabulary();
    if vocabulary <= 2 * bytes {
        return None;
    }
    if matches!(codec, Some(Codec::Bytes)) {
        return Some(format!(
            "data: the text is read as bytes, {bytes} tokens, but the model has {vocabulary}; name data.tokenizer, or set \
             model.vocabulary to {bytes}"
        ));
    }
    let largest =
        largest.and_then(|largest| u64::try_from(largest).ok()).filter(|&largest| largest < bytes)?;
    Some(format!(
        "data: no token is larger than {largest}, but the model has {vocabulary}; were bytes written instead of tokens?"
    ))
}

impl DataRecipe {
    /// Where tokens come from; `None` when the recipe does not say clearly, which [`Recipe::problems`] tells.
    fn source(&self, recipe: &Recipe) -> Result<Option<Source>, String> {
        let mut sources = Vec::new();
        if let Some(paths) = self.text.clone() {
            sources.push(Source::Text { paths, extensions: self.extensions.clone() });
        }
        if let Some(paths) = self.jsonl.clone() {
            let field = self.field.clone().unwrap_or_else(|| "text".into());
            sources.push(Source::JsonLines { paths, field });
        }
        if let Some(paths) = self.parquet.clone() {
            let column = self.column.clone().unwrap_or_else(|| "text".into());
            sources.push(Source::Parquet { paths, column });
        }
        if let Some(paths) = self.samples.clone() {
            sources.push(Source::Samples(SampleFiles {
                paths,
                kind: self.kind.as_deref().and_then(SampleKind::of_name),
                rendering: Arc::new(self.rendering(recipe)?),
                length: recipe.row_tokens(),
                too_long: self.too_long.as_deref().and_then(TooLong::of_name).unwrap_or_default(),
                layout: recipe.objective().layout(),
            }));
        }
        if let Some(paths) = self.tokens.clone() {
            sources.push(Source::Tokens { paths, kind: self.token_type() });
        }
        if let Some(prefixes) = self.megatron.clone() {
            sources.push(Source::Megatron { prefixes });
        }
        if let Some(tokens) = self.synthetic {
            let vocabulary = recipe.model.vocabulary.unwrap_or(256);
            sources.push(Source::Synthetic { tokens, vocabulary, seed: recipe.seed });
        }
        Ok(match &sources[..] {
            [source] if !source.is_nowhere() => sources.pop(),
            _ => None,
        })
    }

    /// How samples become tokens: by the template that is named, else by that of the tokenizer's folder or the model's.
    fn rendering(&self, recipe: &Recipe) -> Result<Rendering, String> {
        let train_on = self.train_on.as_deref().and_then(TrainOn::of_name).unwrap_or_default();
        let model = recipe.model.folder();
        let beside = match self.tokenizer.as_deref() {
            Some("bytes") => None,
            Some(file) => Path::new(file).parent().map(Path::to_path_buf),
            None => model.clone(),
        };
        if let Some(name) = &self.chat_template {
            let template = ChatTemplate::of_name(name, beside.as_deref());
            let template = template.map_err(|error| format!("data.chat_template: {error}"))?;
            return Ok(Rendering { template: Some(template), train_on });
        }
        for folder in beside.into_iter().chain(model) {
            let template = ChatTemplate::of_model(&folder);
            let template = template.map_err(|error| format!("data.chat_template: {error}"))?;
            if !template.is_plain() {
                return Ok(Rendering { template: Some(template), train_on });
            }
        }
        Ok(Rendering { template: None, train_on })
    }

    /// How `tokens` are written; [`Recipe::problems`] has refused all but these two.
    fn token_type(&self) -> TokenType {
        match self.token_type.as_deref() {
            Some("u32") => TokenType::U32,
            _ => TokenType::U16,
        }
    }
}

/// How text becomes tokens; tokens that were tokens from the start may have one too, for samples.
fn codec(recipe: &Recipe, source: Option<&Source>) -> Result<Option<Codec>, String> {
    let file = match recipe.data.tokenizer.as_deref() {
        Some("bytes") => return Ok(Some(Codec::Bytes)),
        Some(file) => Some(PathBuf::from(file)),
        None => {
            recipe.model.folder().map(|folder| folder.join("tokenizer.json")).filter(|file| file.is_file())
        }
    };
    match file {
        Some(file) => Codec::from_file(&file).map(Some).map_err(|error| format!("data.tokenizer: {error}")),
        None if source.is_some_and(|source| !source.is_text()) => Ok(None),
        None => Ok(Some(Codec::Bytes)),
    }
}

/// Puts the tokenizer's files, and the model's own for generating, where the weights will lie, so that the model's folder is
/// all that is needed to use it.
pub(crate) fn copy_companions(recipe: &Recipe, codec: Option<&Codec>, model: &Path) -> Result<()> {
    let own = recipe.model.folder();
    let beside = own.as_ref().map(|folder| folder.join("tokenizer.json"));
    let tokenizer = match codec {
        Some(codec) => codec.path(),
        None => beside.as_deref(),
    };
    if let Some(tokenizer) = tokenizer
        && let Some(folder) = tokenizer.parent()
    {
        copy_files(folder, model, &TOKENIZER_FILES)?;
        copy_files(folder, model, &GENERATION_FILES)?;
        if tokenizer.is_file() && !tokenizer.ends_with("tokenizer.json") {
            let to = model.join("tokenizer.json");
            std::fs::create_dir_all(model).map_err(TrainError::io(model))?;
            copy_file(tokenizer, &to)?;
        }
    }
    own.map_or(Ok(()), |folder| copy_files(&folder, model, &GENERATION_FILES))?;
    // What was trained is what is served: a template that the recipe names, or the model's own where no tokenizer's files bring it.
    let is_left = recipe.data.chat_template.is_some() || tokenizer.is_none();
    if let (true, Some(Source::Samples(samples))) = (is_left, Sources::of(recipe).train)
        && let Some(source) = samples.rendering.template.as_ref().and_then(ChatTemplate::source)
    {
        let path = model.join("chat_template.jinja");
        std::fs::create_dir_all(model).map_err(TrainError::io(model))?;
        ferrospeed_files::write(&path, source).map_err(TrainError::io(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_for_a_model_of_words_are_told() {
        let text = looks_like_bytes(Some(&Codec::Bytes), None, 50_257).unwrap();
        assert!(text.contains("the model has 50257; name data.tokenizer"), "{text}");
        let tokens = looks_like_bytes(None, Some(122), 50_257).unwrap();
        assert!(tokens.contains("no token is larger than 122"), "{tokens}");
        for (codec, largest, vocabulary) in [
            (Some(&Codec::Bytes), None, 256),
            (None, Some(122), 256),
            (None, Some(40_000), 50_257),
            (None, None, 50_257),
        ] {
            assert_eq!(looks_like_bytes(codec, largest, vocabulary), None);
        }
    }
}
