//! Where tokens come from: the formats a recipe can name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::TokenStream;
use crate::cache::{self, Tell};
use crate::codec::Codec;
use crate::documents::{Cut, Documents, JsonLinesTexts, ParquetTexts, TextFiles};
use crate::error::{DataError, Result};
use crate::files;
use crate::megatron;
use crate::synthetic::Synthetic;
use crate::token_file::{Joined, TokenFile, TokenType};

/// A kind of data and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Plain files, each a document.
    Text {
        /// Files, or folders of files.
        paths: Vec<PathBuf>,
        /// Which files of folders; all, if empty.
        extensions: Vec<String>,
    },
    /// JSON lines, each a document.
    JsonLines {
        /// Files, or folders of `.jsonl` and `.json` files.
        paths: Vec<PathBuf>,
        /// The field that holds the text.
        field: String,
    },
    /// Rows of Parquet files, each a document.
    Parquet {
        /// Files, or folders of `.parquet` files.
        paths: Vec<PathBuf>,
        /// The column that holds the text.
        column: String,
    },
    /// Token ids as numbers, as nanoGPT writes them.
    Tokens {
        /// Files, or folders of `.bin` files.
        paths: Vec<PathBuf>,
        /// How a token is written.
        kind: TokenType,
    },
    /// Megatron-LM's indexed datasets.
    Megatron {
        /// Prefixes of `.bin` and `.idx` files.
        prefixes: Vec<PathBuf>,
    },
    /// Tokens made up on the spot.
    Synthetic {
        /// How many.
        tokens: u64,
        /// Ids are below this.
        vocabulary: u64,
        /// Which ones.
        seed: u64,
    },
}

impl Source {
    /// Whether it holds text, which a [`Codec`] turns into tokens.
    pub fn is_text(&self) -> bool {
        matches!(self, Source::Text { .. } | Source::JsonLines { .. } | Source::Parquet { .. })
    }

    /// Whether it names no file at all.
    pub fn is_nowhere(&self) -> bool {
        match self {
            Source::Text { paths, .. }
            | Source::JsonLines { paths, .. }
            | Source::Parquet { paths, .. }
            | Source::Tokens { paths, .. }
            | Source::Megatron { prefixes: paths } => paths.is_empty(),
            Source::Synthetic { .. } => false,
        }
    }

    /// The same kind of data from other files.
    pub fn with_paths(&self, new: Vec<PathBuf>) -> Source {
        let mut other = self.clone();
        match &mut other {
            Source::Text { paths, .. }
            | Source::JsonLines { paths, .. }
            | Source::Parquet { paths, .. }
            | Source::Tokens { paths, .. }
            | Source::Megatron { prefixes: paths } => *paths = new,
            Source::Synthetic { .. } => {}
        }
        other
    }

    /// What is named and is neither a file nor a folder, one line each.
    pub fn unusable(&self) -> Vec<String> {
        let named = match self {
            Source::Text { paths, .. }
            | Source::JsonLines { paths, .. }
            | Source::Parquet { paths, .. }
            | Source::Tokens { paths, .. } => paths.clone(),
            Source::Megatron { prefixes } => prefixes
                .iter()
                .map(|prefix| megatron::files(prefix))
                .flat_map(|(index, tokens)| [index, tokens])
                .collect(),
            Source::Synthetic { .. } => Vec::new(),
        };
        let problem = |path: PathBuf| match path.metadata() {
            Ok(found) if found.is_file() || found.is_dir() => None,
            Ok(_) => Some(format!("{} is no plain file but a pipe, socket or device", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Some(format!("{} does not exist", path.display()))
            }
            Err(error) => Some(format!("{}: {error}", path.display())),
        };
        named.into_iter().filter_map(problem).collect()
    }

    /// Bytes of text that opening it reads, the first time; 0 where there is no text.
    pub fn text_bytes(&self) -> Result<u64> {
        if !self.is_text() {
            return Ok(0);
        }
        self.files()?.iter().map(|file| Ok(std::fs::metadata(file).map_err(DataError::io(file))?.len())).sum()
    }

    /// How many tokens it has, or more than it can have, as far as sizes of files tell; `None` where only reading tells.
    pub fn most_tokens(&self, codec: Option<&Codec>) -> Option<u64> {
        let files = self.files().ok()?;
        let bytes =
            || files.iter().map(|file| Some(std::fs::metadata(file).ok()?.len())).sum::<Option<u64>>();
        let is_bytes = matches!(codec, Some(Codec::Bytes));
        match self {
            // A separator behind each document; a line of JSON has more bytes around its text.
            Source::Text { .. } if is_bytes => Some(bytes()? + files.len() as u64),
            Source::JsonLines { .. } if is_bytes => bytes(),
            Source::Tokens { kind, .. } => Some(bytes()? / kind.bytes()),
            Source::Synthetic { tokens, .. } => Some(*tokens),
            _ => None,
        }
    }

    /// The files it stands for.
    fn files(&self) -> Result<Vec<PathBuf>> {
        match self {
            Source::Text { paths, extensions } => files::list(paths, extensions),
            Source::JsonLines { paths, .. } => files::list(paths, &["jsonl".into(), "json".into()]),
            Source::Parquet { paths, .. } => files::list(paths, &["parquet".into()]),
            Source::Tokens { paths, .. } => files::list(paths, &["bin".into()]),
            Source::Megatron { prefixes } => Ok(prefixes.clone()),
            Source::Synthetic { .. } => Ok(Vec::new()),
        }
    }

    /// Opens it. Text is turned into a token file in `cache` by `codec` unless that was done before, and `tell` hears
    /// how far that is.
    pub fn open(&self, codec: &Codec, cache: &Path, tell: Tell<'_>) -> Result<Arc<dyn TokenStream>> {
        let files = self.files()?;
        match self {
            Source::Text { .. } => {
                let cut = if matches!(codec, Codec::Bytes) { Cut::Anywhere } else { Cut::AtLines };
                let mut documents = TextFiles::new(files.clone(), cut);
                from_text("text".into(), files, codec, &mut documents, cache, tell)
            }
            Source::JsonLines { field, .. } => {
                let mut documents = JsonLinesTexts::new(files.clone(), field);
                from_text(format!("jsonl:{field}"), files, codec, &mut documents, cache, tell)
            }
            Source::Parquet { column, .. } => {
                let mut documents = ParquetTexts::new(files.clone(), column);
                from_text(format!("parquet:{column}"), files, codec, &mut documents, cache, tell)
            }
            Source::Tokens { kind, .. } => {
                joined(files.iter().map(|file| TokenFile::open(file, *kind)?.expect_width()))
            }
            Source::Megatron { .. } => joined(files.iter().map(|prefix| megatron::open(prefix))),
            Source::Synthetic { tokens, vocabulary, seed } => {
                Ok(Arc::new(Synthetic::new(*tokens, *vocabulary, *seed)))
            }
        }
    }
}

fn from_text(
    what: String,
    files: Vec<PathBuf>,
    codec: &Codec,
    documents: &mut dyn Documents,
    cache: &Path,
    tell: Tell<'_>,
) -> Result<Arc<dyn TokenStream>> {
    let recipe = cache::Recipe::new(what, &files, codec)?;
    Ok(Arc::new(cache::open_or_make(cache, recipe, codec, documents, tell)?))
}

fn joined(parts: impl Iterator<Item = Result<TokenFile>>) -> Result<Arc<dyn TokenStream>> {
    let parts = parts
        .map(|part| part.map(|part| Box::new(part) as Box<dyn TokenStream>))
        .collect::<Result<Vec<_>>>()?;
    if parts.is_empty() {
        return Err(DataError::TooLittle { tokens: 0, wanted: "anything", sequence: 1 });
    }
    Ok(Arc::new(Joined::new(parts)))
}
