//! Texts are turned into a token file once, beside the run; every rank, and every later run of the same data, reads
//! that.
//!
//! A cache of the name `tokens-KEY` is three files, of samples four: `.bin`, the tokens, `.ends`, where documents end in them, `.mask`, a byte
//! for each token of samples that says what it is to the objective, and `.json`, what they were made from, how many they are and their checksum, which is written last and so vouches for the others. The key covers the texts' paths and content, the tokenizer and
//! the separator: when any of them changes, another file is made, and so when the files are not what was written. Ranks that start together
//! find one builder: it holds a lock, which the system takes back if it dies. What it makes are new files that take their names when they
//! are complete, so that nothing is written through a link; those that killed builders left are removed.

use std::fs::{File, TryLockError};
use std::io::{BufWriter, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use ferrospeed_text::{Codec, Sample};
use serde::{Deserialize, Serialize};

use crate::TokenStream;
use crate::documents::{Documents, Piece};
use crate::ends::{Ends, EndsWriter};
use crate::error::{DataError, Result};
use crate::new_file::{New, Summed};
use crate::sampler::mix;
use crate::samples::{Counted, Mark};
use crate::stamp::{FileStamp, stamps, stamps_within};
use crate::token_file::{TokenFile, TokenType, read_at};

/// Text is handed to the tokenizer in batches of about this size.
const BATCH_BYTES: usize = 4 << 20;
/// How often it is asked whether another builder is done.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often whoever hears of it is asked while a batch becomes tokens, which may take seconds.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// How far the making of a token file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preparing {
    /// Bytes of text read so far.
    pub bytes: u64,
    /// Bytes of text in all.
    pub total_bytes: u64,
    /// Tokens written so far.
    pub tokens: u64,
}

/// Who hears how far it is, now and then, and may say to stop: then nothing of it stays.
pub type Tell<'a> = &'a mut dyn FnMut(Preparing) -> ControlFlow<()>;

/// Nobody does.
pub fn unheard(_: Preparing) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// What a token file is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recipe {
    version: u32,
    /// Format and field.
    what: String,
    files: Vec<FileStamp>,
    tokenizer: Option<FileStamp>,
    separator: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    made_from: Recipe,
    token_type: TokenType,
    tokens: u64,
    documents: u64,
    vocabulary: u64,
    /// Of all files, of what was written to them.
    checksum: u32,
    /// What became of samples, where it is made of those.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    counted: Option<Counted>,
    /// Of files that are too large to be read whole every time: as they were when they had been written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stamps: Option<Vec<FileStamp>>,
}

impl Recipe {
    pub(crate) fn new(what: String, files: &[PathBuf], codec: &Codec) -> Result<Recipe> {
        Ok(Recipe {
            version: 5,
            what,
            files: stamps(files)?,
            tokenizer: codec
                .path()
                .map(|path| stamps(&[path.to_path_buf()]))
                .transpose()?
                .and_then(|mut one| one.pop()),
            separator: codec.separator()?,
        })
    }

    fn key(&self) -> u64 {
        let text = serde_json::to_vec(self).unwrap_or_default();
        text.iter().fold(0, |key, &byte| mix(key ^ u64::from(byte)))
    }

    /// Refuses texts that were changed since.
    fn expect_unchanged(&self) -> Result<()> {
        let paths: Vec<PathBuf> = self.files.iter().map(|file| file.path.clone()).collect();
        let now = stamps(&paths)?;
        match self.files.iter().zip(&now).find(|(before, now)| before != now) {
            Some((file, _)) => {
                let why = "was changed while it became tokens; start again when nobody writes to it any more";
                Err(DataError::bad_file(&file.path, why))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Writes the tokens of a recipe.
pub(crate) type Fill<'a> = &'a mut dyn FnMut(&mut Writer<'_>, &Recipe, Tell<'_>) -> Result<()>;

/// The token file of `recipe` in `folder`, made by `fill` if it is not there.
pub(crate) fn open_or_make(
    folder: &Path,
    recipe: Recipe,
    codec: &Codec,
    fill: Fill<'_>,
    tell: Tell<'_>,
) -> Result<CachedTokens> {
    ferrospeed_files::create_folder(folder).map_err(DataError::io(folder))?;
    let name = format!("tokens-{:016x}", recipe.key());
    let (tokens, manifest) = (folder.join(format!("{name}.bin")), folder.join(format!("{name}.json")));
    if let Some(found) = open(&tokens, &manifest, &recipe)? {
        return Ok(found);
    }
    let lock = folder.join(format!("{name}.lock"));
    let lock = ferrospeed_files::open_lock(&lock).map_err(DataError::io(&lock))?;
    wait_for(&lock, recipe.total_bytes(), tell)?;
    if let Some(found) = open(&tokens, &manifest, &recipe)? {
        return Ok(found);
    }
    // Whatever tokens they were of: nobody may ever make the same again.
    ferrospeed_files::unfinished::remove_files(folder);
    make(&tokens, &manifest, recipe.clone(), codec, fill, tell)?;
    open(&tokens, &manifest, &recipe)?
        .ok_or_else(|| DataError::bad_file(&manifest, "is not what was just written to it"))
}

/// Waits until nobody else makes the same tokens. Where files cannot be locked, two builders write them to files of their own,
/// and the later name wins.
fn wait_for(lock: &File, total_bytes: u64, tell: Tell<'_>) -> Result<()> {
    loop {
        match lock.try_lock() {
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
            Err(TryLockError::WouldBlock) => {}
        }
        if tell(Preparing { bytes: 0, total_bytes, tokens: 0 }).is_break() {
            return Err(DataError::Stopped);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Files of so many bytes together are compared with their checksum whenever they are opened. Of more, so many bytes are read,
/// spread evenly; where those or the time of a file are others than they were, the checksum of all decides.
const CHECKED_BYTES: u64 = 1 << 30;
/// A manifest names the files it was made from.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

fn open(tokens: &Path, manifest: &Path, recipe: &Recipe) -> Result<Option<CachedTokens>> {
    let Ok(text) = ferrospeed_files::read(manifest, MAX_MANIFEST_BYTES) else { return Ok(None) };
    let Ok(found) = serde_json::from_slice::<Manifest>(&text) else { return Ok(None) };
    let bytes = std::fs::metadata(tokens).map(|about| about.len()).unwrap_or(0);
    if found.made_from != *recipe
        || bytes != found.tokens.saturating_mul(found.token_type.bytes())
        || bytes == 0
    {
        return Ok(None);
    }
    let [ends, mask_path] = ["ends", "mask"].map(|extension| tokens.with_extension(extension));
    let masks = found.counted.map(|_| &*mask_path);
    let all: Vec<&Path> = [tokens, &ends].into_iter().chain(masks).collect();
    if !is_what_was_written(&found, &all, CHECKED_BYTES) {
        return Ok(None);
    }
    let mask = match masks.map(ferrospeed_files::open) {
        Some(Ok(file)) => Some((mask_path, file)),
        Some(Err(_)) => return Ok(None),
        None => None,
    };
    let Some(ends) = Ends::open(&ends, found.documents)? else { return Ok(None) };
    let file = TokenFile::open(tokens, found.token_type)?;
    Ok(Some(CachedTokens { file, ends, mask, counted: found.counted, vocabulary: found.vocabulary }))
}

fn is_what_was_written(found: &Manifest, files: &[&Path], checked_bytes: u64) -> bool {
    let is_as_before = |before: &Vec<FileStamp>| {
        let now = stamps_of_large(files, checked_bytes).unwrap_or_default();
        now.is_some_and(|now| {
            now.len() == before.len()
                && now.iter().zip(before).all(|(now, before)| now.is_of_the_same(before))
        })
    };
    found.stamps.as_ref().is_some_and(is_as_before)
        || checksum(files, &mut || Ok(())).ok() == Some(found.checksum)
}

/// The stamps of a cache's files, where they are too large to be read whole every time.
fn stamps_of_large(files: &[&Path], checked_bytes: u64) -> Result<Option<Vec<FileStamp>>> {
    let size = |path: &&Path| Ok(std::fs::metadata(path).map_err(DataError::io(path))?.len());
    let total: u64 = files.iter().map(size).sum::<Result<u64>>()?;
    if total <= checked_bytes {
        return Ok(None);
    }
    let files: Vec<PathBuf> = files.iter().map(|path| path.to_path_buf()).collect();
    stamps_within(&files, checked_bytes).map(Some)
}

/// The checksum of a cache's files; between blocks is asked whether to go on.
fn checksum(files: &[&Path], go_on: &mut dyn FnMut() -> Result<()>) -> Result<u32> {
    let mut sum = crc32fast::Hasher::new();
    let mut block = vec![0; 1 << 20];
    for &path in files {
        let mut file = ferrospeed_files::open(path).map_err(DataError::io(path))?;
        loop {
            let count = file.read(&mut block).map_err(DataError::io(path))?;
            if count == 0 {
                break;
            }
            sum.update(&block[..count]);
            go_on()?;
        }
    }
    Ok(sum.finalize())
}

fn make(
    tokens: &Path,
    manifest: &Path,
    recipe: Recipe,
    codec: &Codec,
    fill: Fill<'_>,
    tell: Tell<'_>,
) -> Result<()> {
    let [ends, mask] = ["ends", "mask"].map(|extension| tokens.with_extension(extension));
    let ((partial, file), (partial_ends, ends_file)) = (New::beside(tokens)?, New::beside(&ends)?);
    let (partial_mask, mask_file) = New::beside(&mask)?;
    let mut out = Writer::new(&partial, file, EndsWriter::new(&partial_ends.path, ends_file), codec);
    out.mask = Some((&partial_mask.path, BufWriter::with_capacity(1 << 18, Summed::new(mask_file))));
    fill(&mut out, &recipe, tell)?;
    let made = out.finish(&recipe)?;
    // What lies there is looked at once more: somebody may have cut it while the rest was written.
    let masks = made.counted.map(|_| &*partial_mask.path);
    let all: Vec<&Path> = [&*partial.path, &partial_ends.path].into_iter().chain(masks).collect();
    let total_bytes = recipe.total_bytes();
    let done = Preparing { bytes: total_bytes, total_bytes, tokens: made.tokens };
    if checksum(&all, &mut || go_on(tell, done))? != made.checksum {
        let why = "is not what was written to it: somebody else changed it, or the disk did; start again";
        return Err(DataError::bad_file(&partial.path, why));
    }
    recipe.expect_unchanged()?;
    let about = Manifest {
        made_from: recipe,
        token_type: TokenType::for_vocabulary(codec.vocabulary()),
        tokens: made.tokens,
        documents: made.documents,
        vocabulary: codec.vocabulary(),
        checksum: made.checksum,
        counted: made.counted,
        stamps: stamps_of_large(&all, CHECKED_BYTES)?,
    };
    let text = serde_json::to_vec_pretty(&about).map_err(|error| DataError::io(manifest)(error.into()))?;
    let (vouching, mut file) = New::beside(manifest)?;
    file.write_all(&text).map_err(DataError::io(&vouching.path))?;
    partial.takes(tokens)?;
    partial_ends.takes(&ends)?;
    if masks.is_some() {
        partial_mask.takes(&mask)?;
    }
    vouching.takes(manifest)
}

/// Whether who hears of it says so.
fn go_on(tell: Tell<'_>, now: Preparing) -> Result<()> {
    match tell(now) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(DataError::Stopped),
    }
}

/// What was written.
struct Written {
    tokens: u64,
    documents: u64,
    /// Of the tokens, then of the ends, then of the mask.
    checksum: u32,
    counted: Option<Counted>,
}

/// Writes the tokens of all documents, a separator after each, and where they end.
pub(crate) fn write_documents(
    writer: &mut Writer<'_>,
    recipe: &Recipe,
    codec: &Codec,
    documents: &mut dyn Documents,
    tell: Tell<'_>,
) -> Result<()> {
    let (mut batch, codec) = (Batch::default(), Arc::new(codec.clone()));
    loop {
        let mut text = Vec::new();
        let piece = documents.next(&mut text)?;
        if piece != Piece::End {
            batch.add(text, piece == Piece::Last);
        }
        if batch.bytes >= BATCH_BYTES || piece == Piece::End {
            let (bytes, total_bytes) = (documents.bytes_read(), recipe.total_bytes());
            let tokens = writer.tokens;
            let mut look = || go_on(tell, Preparing { bytes, total_bytes, tokens });
            batch.write(&codec, &recipe.separator, writer, &mut look)?;
            go_on(tell, Preparing { bytes, total_bytes, tokens: writer.tokens })?;
        }
        if piece == Piece::End {
            return Ok(());
        }
    }
}

/// Writes tokens, where documents end, and of samples what is learnt.
pub(crate) struct Writer<'a> {
    path: &'a Path,
    out: BufWriter<Summed>,
    bytes_per_token: usize,
    pub(crate) tokens: u64,
    ends: EndsWriter,
    mask: Option<(&'a Path, BufWriter<Summed>)>,
    counted: Option<Counted>,
}

impl<'a> Writer<'a> {
    fn new(partial: &'a New, file: File, ends: EndsWriter, codec: &Codec) -> Writer<'a> {
        let bytes_per_token = TokenType::for_vocabulary(codec.vocabulary()).bytes() as usize;
        let out = BufWriter::with_capacity(1 << 20, Summed::new(file));
        Writer { path: &partial.path, out, bytes_per_token, tokens: 0, ends, mask: None, counted: None }
    }

    fn write(&mut self, ids: &[u32]) -> Result<()> {
        self.tokens += ids.len() as u64;
        ids.iter()
            .try_for_each(|id| self.out.write_all(&id.to_le_bytes()[..self.bytes_per_token]))
            .map_err(DataError::io(self.path))
    }

    /// One sample, which is a document and learnt.
    pub(crate) fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.marked(sample, Mark::Learnt)
    }

    /// One sample, which is a document; `mark` is what its learnt tokens are.
    pub(crate) fn marked(&mut self, sample: &Sample, mark: Mark) -> Result<()> {
        self.write(&sample.tokens)?;
        self.ends.write(self.tokens)?;
        let Some((path, mask)) = &mut self.mask else { return Ok(()) };
        let marked = |&trained: &bool| if trained { mark as u8 } else { Mark::Shown as u8 };
        let bytes: Vec<u8> = sample.trained.iter().map(marked).collect();
        mask.write_all(&bytes).map_err(DataError::io(path))
    }

    /// What became of all samples, once they are written.
    pub(crate) fn counted(&mut self, counted: Counted) {
        self.counted = Some(counted);
    }

    fn finish(self, recipe: &Recipe) -> Result<Written> {
        let Writer { path, out, tokens, ends, mask, counted, .. } = self;
        if tokens == 0 {
            return Err(nothing(recipe, counted));
        }
        let mut sum = summed(path, out)?;
        let (documents, of_ends) = ends.finish()?;
        sum.combine(&of_ends);
        if let (Some((path, mask)), Some(_)) = (mask, counted) {
            sum.combine(&summed(path, mask)?);
        }
        Ok(Written { tokens, documents, checksum: sum.finalize(), counted })
    }
}

fn summed(path: &Path, out: BufWriter<Summed>) -> Result<crc32fast::Hasher> {
    let summed = out.into_inner().map_err(|error| DataError::io(path)(error.into_error()))?;
    summed.finish().map_err(DataError::io(path))
}

/// Why there is no token.
fn nothing(recipe: &Recipe, counted: Option<Counted>) -> DataError {
    let first = recipe.files.first().map(|file| file.path.clone()).unwrap_or_default();
    let why = match (counted, recipe.files.len()) {
        (Some(Counted { samples: 1.., dropped, .. }), _) => format!(
            "leaves nothing to learn: all {dropped} samples were dropped, for they are longer than data.sequence or what is learnt lies \
             behind it (of pairs, or both answers are alike); take a longer sequence, or data.too_long = \"split\" where samples may be"
        ),
        (_, 0 | 1) => "is empty: there is no text in it".to_owned(),
        (_, files) => format!("is empty, and so are all {files} files: there is no text in them"),
    };
    DataError::bad_file(&first, why)
}

/// Pieces of text that are turned into tokens together.
#[derive(Default)]
struct Batch {
    pieces: Vec<Vec<u8>>,
    /// Whether a document ends with the piece.
    ends: Vec<bool>,
    /// Whether the piece goes on with a document, which was cut behind a newline.
    continues: Vec<bool>,
    bytes: usize,
    /// Whether the document at hand has any text; one without is passed over, separator and all.
    has_text: bool,
}

impl Batch {
    fn add(&mut self, text: Vec<u8>, ends: bool) {
        let continues = self.has_text;
        self.has_text |= !text.is_empty();
        if self.has_text {
            self.bytes += text.len();
            self.pieces.push(text);
            self.ends.push(ends);
            self.continues.push(continues);
        }
        self.has_text &= !ends;
    }

    fn write(
        &mut self,
        codec: &Arc<Codec>,
        separator: &[u32],
        writer: &mut Writer<'_>,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let (pieces, ends) = (std::mem::take(&mut self.pieces), std::mem::take(&mut self.ends));
        let continues = std::mem::take(&mut self.continues);
        self.bytes = 0;
        let ids: Vec<Vec<u32>> = match &**codec {
            Codec::Bytes => {
                pieces.iter().map(|piece| piece.iter().map(|&byte| byte.into()).collect()).collect()
            }
            // Every source has checked that its text is UTF-8: nothing is lost here.
            Codec::Tokenizer(_) => {
                let texts = pieces.iter().map(|piece| String::from_utf8_lossy(piece).into_owned());
                encoded(codec, texts.zip(continues).collect(), look)?
            }
        };
        for (ids, ends) in ids.iter().zip(ends) {
            writer.write(ids)?;
            if ends {
                writer.write(separator)?;
                writer.ends.write(writer.tokens)?;
            }
        }
        Ok(())
    }
}

/// Pieces of text as tokens. They are made on a thread beside, so that who wants to stop is heard meanwhile; what nobody waits for any
/// more is made to its end, and dropped.
fn encoded(
    codec: &Arc<Codec>,
    texts: Vec<(String, bool)>,
    look: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Vec<u32>>> {
    if texts.is_empty() {
        return Ok(Vec::new());
    }
    let (send, receive) = sync_channel(1);
    let beside = Arc::clone(codec);
    let work = move || {
        let _ = send.send(beside.encode_all(texts));
    };
    let thread = std::thread::Builder::new().name("tokens".into()).spawn(work);
    thread.map_err(|error| DataError::io(Path::new("a thread that makes tokens"))(error))?;
    loop {
        look()?;
        match receive.recv_timeout(TELL_EVERY) {
            Ok(ids) => return Ok(ids?),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let why = std::io::Error::other("ended without a result");
                return Err(DataError::io(Path::new("the thread that makes tokens"))(why));
            }
        }
    }
}

/// A token file that was made here.
#[derive(Debug)]
pub(crate) struct CachedTokens {
    file: TokenFile,
    ends: Ends,
    mask: Option<(PathBuf, File)>,
    counted: Option<Counted>,
    vocabulary: u64,
}

impl TokenStream for CachedTokens {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn vocabulary(&self) -> Option<u64> {
        Some(self.vocabulary)
    }

    fn read(&self, start: u64, out: &mut [i64]) -> Result<()> {
        self.file.read(start, out)
    }

    fn place(&self, token: u64) -> String {
        self.file.place(token)
    }

    fn beginnings(&self, start: u64, count: u64) -> Result<Option<Vec<u64>>> {
        // No document begins where the last one ends.
        self.ends.within(start, count.min(self.len().saturating_sub(start))).map(Some)
    }

    fn marks(&self, start: u64, count: usize) -> Result<Option<Vec<u8>>> {
        let Some((path, file)) = &self.mask else { return Ok(None) };
        let mut bytes = vec![0; count];
        read_at(path, file, &mut bytes, start)?;
        Ok(Some(bytes))
    }

    fn counted(&self) -> Option<Counted> {
        self.counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_cache_that_is_too_large_to_be_read_whole_is_known_by_its_blocks_and_its_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.bin");
        let mut bytes = vec![7u8; 8 * MIB];
        std::fs::write(&path, &bytes).unwrap();
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let files = [&*path];
        let manifest = Manifest {
            made_from: Recipe {
                version: 5,
                what: String::new(),
                files: Vec::new(),
                tokenizer: None,
                separator: Vec::new(),
            },
            token_type: TokenType::for_vocabulary(256),
            tokens: bytes.len() as u64,
            documents: 1,
            vocabulary: 256,
            checksum: checksum(&files, &mut || Ok(())).unwrap(),
            counted: None,
            stamps: stamps_of_large(&files, 2 * MIB as u64).unwrap(),
        };
        assert!(manifest.stamps.is_some() && stamps_of_large(&files, 1 << 30).unwrap().is_none());
        let is_known = || is_what_was_written(&manifest, &files, 2 * MIB as u64);
        assert!(is_known());
        // With another time, as a copy has, the checksum of all decides.
        let touch = |time| File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        touch(time + Duration::from_secs(5));
        assert!(is_known());
        for (place, keeps_time) in [(4 * MIB, true), (5 * MIB, false)] {
            bytes[place] = 8;
            std::fs::write(&path, &bytes).unwrap();
            touch(if keeps_time { time } else { time + Duration::from_secs(9) });
            assert!(!is_known(), "byte {place}");
            bytes[place] = 7;
        }
    }
}
