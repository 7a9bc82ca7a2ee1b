//! What a file holds that a model is to be measured on.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrospeed_data::{
    DataError, Layout, Rendering, SampleFiles, SampleKind, Source, TokenType, TooLong, each_record,
};
use ferrospeed_text::{ChatTemplate, TrainOn};

use crate::ask::Model;
use crate::error::{EvaluateError, Result};

/// How files are read where they do not say it themselves.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Tokens of a sequence; default: as many as the model can see, and 2048 at most.
    pub sequence: Option<usize>,
    /// What records are; default: told by the first one.
    pub kind: Option<SampleKind>,
    /// How conversations become text: a name or a file; default: the model's own.
    pub chat_template: Option<String>,
    /// What of samples counts.
    pub train_on: TrainOn,
    /// How token files are written; default: two bytes each.
    pub token_type: Option<TokenType>,
}

/// Sequences where nobody says how long they are.
const USUAL_SEQUENCE: usize = 2048;

impl Reading {
    /// Tokens of a sequence of a model.
    pub(crate) fn sequence(&self, model: &Model) -> usize {
        self.sequence.unwrap_or(USUAL_SEQUENCE).min(model.longest())
    }
}

/// What there is to ask.
#[derive(Debug)]
pub enum Material {
    /// Questions with answers, and how conversations among them become text.
    Tasks(Vec<PathBuf>, Box<ChatTemplate>),
    /// Samples of which a part counts, each by itself.
    Samples(SampleFiles),
    /// Text or tokens, cut into sequences of which all counts.
    Tokens(Source),
}

/// Files of records, by how their names end.
const RECORDS: [&str; 6] = ["jsonl", "ndjson", "json", "parquet", "gz", "zst"];

impl Material {
    /// What a file or folder holds, by its name and by its first record.
    pub fn of(path: &Path, model: &Model, reading: &Reading) -> Result<Material> {
        let paths = vec![path.to_path_buf()];
        if path.with_extension("idx").is_file() && path.with_extension("bin").is_file() {
            return Ok(Material::Tokens(Source::Megatron { prefixes: vec![path.with_extension("")] }));
        }
        let found =
            path.metadata().map_err(|error| DataError::Io { path: path.to_path_buf(), source: error })?;
        let ends_with = |path: &Path, known: &[&str]| {
            path.extension().and_then(|ending| ending.to_str()).is_some_and(|ending| known.contains(&ending))
        };
        let holds = |known: &[&str]| {
            std::fs::read_dir(path)
                .is_ok_and(|mut all| all.any(|file| file.is_ok_and(|file| ends_with(&file.path(), known))))
        };
        if ends_with(path, &["bin"]) || (found.is_dir() && holds(&["bin"])) {
            return Ok(Material::Tokens(Source::Tokens {
                paths,
                kind: reading.token_type.unwrap_or(TokenType::U16),
            }));
        }
        if !(ends_with(path, &RECORDS) || found.is_dir() && holds(&RECORDS)) {
            return Ok(Material::Tokens(Source::Text { paths, extensions: Vec::new() }));
        }
        let samples = SampleFiles {
            paths,
            kind: reading.kind,
            rendering: Arc::new(rendering(model, reading)?),
            length: reading.sequence(model) as u64,
            too_long: TooLong::Cut,
            layout: Layout::Packed,
        };
        let files = samples.files()?;
        let mut is_task = None;
        each_record(&files, &mut |record| {
            is_task = Some(reading.kind.is_none() && crate::case::is_case(&record.value));
            Ok(ControlFlow::Break(()))
        })?;
        match is_task {
            None => Err(EvaluateError::nothing(path, "is empty: there is no record in it")),
            // A model without a template is asked as it is served.
            Some(true) => {
                let named = rendering(model, reading)?.template;
                let template = named.map_or_else(|| model.facts().template.again(), Ok)?;
                Ok(Material::Tasks(files, Box::new(template)))
            }
            Some(false) => Ok(Material::Samples(samples)),
        }
    }
}

fn rendering(model: &Model, reading: &Reading) -> Result<Rendering> {
    let own = model.path();
    let template = match (&reading.chat_template, model.facts().template.source()) {
        (Some(name), _) => Some(ChatTemplate::of_name(name, Some(own).filter(|path| path.is_dir()))?),
        (None, Some(_)) => Some(model.facts().template.again()?),
        (None, None) => None,
    };
    Ok(Rendering { template, train_on: reading.train_on })
}
