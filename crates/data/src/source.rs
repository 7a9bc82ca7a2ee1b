//! Where tokens come from: the formats a recipe can name.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrospeed_text::{Codec, Sample};

use crate::TokenStream;
use crate::cache::{self, Preparing, Tell};
use crate::documents::{Cut, Documents, JsonLinesTexts, ParquetTexts, TextFiles};
use crate::error::{DataError, Result};
use crate::files;
use crate::megatron;
use crate::samples::{self, Counted, Layout, Marked, Record, Rendering, SampleKind, TooLong};
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
    /// Conversations, instructions, completions: samples of which a part is learnt.
    Samples(SampleFiles),
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

/// Files of samples, and how they become sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleFiles {
    /// Files, folders of them, or patterns with `*`.
    pub paths: Vec<PathBuf>,
    /// What they hold; by default told by the first record.
    pub kind: Option<SampleKind>,
    /// How they become tokens.
    pub rendering: Arc<Rendering>,
    /// Tokens of a sequence; of one that holds two samples, of both together.
    pub length: u64,
    /// What becomes of those that are longer.
    pub too_long: TooLong,
    /// How they lie in sequences.
    pub layout: Layout,
}

impl SampleFiles {
    /// What the files hold.
    pub fn kind(&self) -> Result<SampleKind> {
        match self.kind {
            Some(kind) => Ok(kind),
            None => samples::kind_of(&self.files()?, self.layout),
        }
    }

    /// Hands out all samples as the model sees them, before they are cut or laid together, with their records. Of a pair it is the
    /// preferred answer that comes first.
    pub fn each(
        &self,
        codec: &Codec,
        take: &mut dyn FnMut(&Record<'_>, Vec<Sample>) -> Result<()>,
    ) -> Result<()> {
        let kind = self.kind()?;
        samples::each_record(&self.files()?, &mut |record| {
            let bad = |why: String| DataError::bad_place(record.path, record.place(), why);
            let samples = match kind.layout() {
                Layout::Pairs => self.rendering.pair(&record.value, codec).map(Vec::from),
                Layout::Packed | Layout::Judged => {
                    self.rendering.sample(kind, &record.value, codec).map(|sample| vec![sample])
                }
            };
            let samples = samples.map_err(bad)?;
            take(&record, samples)?;
            Ok(ControlFlow::Continue(()))
        })
    }

    /// The files that are meant.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let extensions: Vec<String> = samples::EXTENSIONS.map(str::to_owned).into();
        files::list(&files::expand(&self.paths)?, &extensions)
    }

    fn open(&self, codec: &Codec, cache: &Path, tell: Tell<'_>) -> Result<Arc<dyn TokenStream>> {
        let (files, kind) = (self.files()?, self.kind()?);
        let (length, too_long) = (self.length, self.too_long);
        self.expect(kind)?;
        let what = format!("samples:{kind}:{length}:{}:{}", too_long.name(), self.rendering.key());
        let recipe = cache::Recipe::new(what, &files, codec)?;
        let mut fill = |writer: &mut cache::Writer<'_>, recipe: &cache::Recipe, tell: Tell<'_>| {
            self.write(&files, kind, codec, writer, recipe, tell)
        };
        Ok(Arc::new(cache::open_or_make(cache, recipe, codec, &mut fill, tell)?))
    }

    fn write(
        &self,
        files: &[PathBuf],
        kind: SampleKind,
        codec: &Codec,
        writer: &mut cache::Writer<'_>,
        recipe: &cache::Recipe,
        tell: Tell<'_>,
    ) -> Result<()> {
        let filling = codec.end_token().unwrap_or(0);
        let total_bytes = recipe.total_bytes();
        let mut read = 0u64;
        // How far it is within a file that may be compressed is not known.
        let mut go_on = |tokens: u64| {
            read += 1;
            let is_told = read.is_multiple_of(TELL_EVERY);
            match is_told && tell(Preparing { bytes: 0, total_bytes, tokens }).is_break() {
                true => Err(DataError::Stopped),
                false => Ok(()),
            }
        };
        let counted = match self.layout {
            Layout::Packed => {
                let mut packer = samples::Packer::new(self.length, self.too_long, filling);
                self.each(codec, &mut |_, samples| {
                    for sample in samples {
                        packer
                            .add(sample, &mut |samples| samples.iter().try_for_each(|s| writer.sample(s)))?;
                    }
                    go_on(writer.tokens)
                })?;
                packer.finish(&mut |samples| samples.iter().try_for_each(|sample| writer.sample(sample)))?
            }
            Layout::Pairs | Layout::Judged => {
                let mut rows = samples::Rows::new(&self.rendering, codec, kind, self.length, self.too_long);
                samples::each_record(files, &mut |record| {
                    if let Some(row) = rows.add(&record)? {
                        self.lay(&mut rows, row, filling, writer)?;
                    }
                    go_on(writer.tokens)?;
                    Ok(ControlFlow::Continue(()))
                })?;
                if let Some(row) = rows.last()? {
                    self.lay(&mut rows, row, filling, writer)?;
                }
                rows.counted
            }
        };
        writer.counted(counted);
        Ok(())
    }

    /// Writes a row of two samples and what fills it.
    fn lay(
        &self,
        rows: &mut samples::Rows<'_>,
        row: [Marked; 2],
        filling: u32,
        writer: &mut cache::Writer<'_>,
    ) -> Result<()> {
        let Some(row) = rows.fitted(row) else { return Ok(()) };
        let mut left = self.length as usize;
        for Marked { sample, mark } in &row {
            writer.marked(sample, *mark)?;
            left -= sample.tokens.len();
        }
        if left > 0 {
            writer.sample(&Sample { tokens: vec![filling; left], trained: vec![false; left] })?;
        }
        Ok(())
    }

    /// Refuses samples that lie in sequences otherwise than what is learnt of them wants.
    fn expect(&self, kind: SampleKind) -> Result<()> {
        let why = match (self.layout, kind.layout()) {
            (wanted, found) if wanted == found => return Ok(()),
            (Layout::Packed, Layout::Pairs) => {
                "holds pairs of answers (kind 'preference'), and the recipe names no objective that learns from them; write objective = \"dpo\" (or \"orpo\"), or give samples to imitate"
            }
            (Layout::Packed, _) => {
                "holds answers that are wanted or not (kind 'unpaired'), and the recipe names no objective that learns from them; write objective = \"kto\", or data.kind = \"completion\" to imitate all of them"
            }
            (Layout::Pairs, _) => {
                return Err(
                    self.other(kind, "pairs: records with 'chosen' and 'rejected', and maybe 'prompt'")
                );
            }
            (Layout::Judged, _) => {
                return Err(self.other(kind, "answers with a verdict: records with 'prompt', 'completion' and 'label', which is true or false"));
            }
        };
        Err(DataError::bad_file(&self.first_file(), why))
    }

    fn other(&self, kind: SampleKind, wanted: &str) -> DataError {
        let why = format!(
            "holds samples of the kind '{kind}', and the recipe's objective learns from {wanted}; give such, or take objective away"
        );
        DataError::bad_file(&self.first_file(), why)
    }

    fn first_file(&self) -> PathBuf {
        self.files().ok().and_then(|files| files.into_iter().next()).unwrap_or_default()
    }

    /// All samples, for whoever wants to look at them, and what would become of them.
    pub fn inspect(&self, codec: &Codec, look: &mut dyn FnMut(&Sample)) -> Result<Counted> {
        let kind = self.kind()?;
        self.expect(kind)?;
        if self.layout == Layout::Packed {
            let mut packer = samples::Packer::new(self.length, self.too_long, 0);
            self.each(codec, &mut |_, samples| {
                samples.into_iter().try_for_each(|sample| {
                    look(&sample);
                    packer.add(sample, &mut |_| Ok(()))
                })
            })?;
            return packer.finish(&mut |_| Ok(()));
        }
        let mut rows = samples::Rows::new(&self.rendering, codec, kind, self.length, self.too_long);
        let mut row = |rows: &mut samples::Rows<'_>, row: Option<[Marked; 2]>| {
            if let Some(row) = row {
                row.iter().for_each(|marked| look(&marked.sample));
                rows.fitted(row);
            }
        };
        samples::each_record(&self.files()?, &mut |record| {
            let found = rows.add(&record)?;
            row(&mut rows, found);
            Ok(ControlFlow::Continue(()))
        })?;
        let last = rows.last()?;
        row(&mut rows, last);
        Ok(rows.counted)
    }
}

/// Samples between two words on how far it is.
const TELL_EVERY: u64 = 256;

impl Source {
    /// Whether it holds text, which a [`Codec`] turns into tokens.
    pub fn is_text(&self) -> bool {
        matches!(
            self,
            Source::Text { .. } | Source::JsonLines { .. } | Source::Parquet { .. } | Source::Samples(_)
        )
    }

    /// Whether it names no file at all.
    pub fn is_nowhere(&self) -> bool {
        match self {
            Source::Text { paths, .. }
            | Source::JsonLines { paths, .. }
            | Source::Parquet { paths, .. }
            | Source::Samples(SampleFiles { paths, .. })
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
            | Source::Samples(SampleFiles { paths, .. })
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
            Source::Samples(samples) => match files::expand(&samples.paths) {
                Ok(paths) => paths,
                Err(error) => return vec![error.to_string()],
            },
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
            Source::Samples(samples) => samples.files(),
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
            Source::Samples(samples) => samples.open(codec, cache, tell),
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
    let mut fill = |writer: &mut cache::Writer<'_>, recipe: &cache::Recipe, tell: Tell<'_>| {
        cache::write_documents(writer, recipe, codec, documents, tell)
    };
    Ok(Arc::new(cache::open_or_make(cache, recipe, codec, &mut fill, tell)?))
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
