//! Text as bytes: every byte is a token, so any file is data and no tokenizer is needed.

use std::path::{Path, PathBuf};

use crate::TokenStream;
use crate::error::{DataError, Result};

/// Ids of [`ByteText`] are below this.
const BYTES: u64 = 256;

/// Files end to end, in order of their paths, a newline between them.
#[derive(Debug, Clone)]
pub struct ByteText {
    bytes: Vec<u8>,
}

impl ByteText {
    /// Reads files; a folder stands for all files below it with one of these extensions (all, if none is given).
    ///
    /// Hidden entries and links are passed over inside folders.
    pub fn read(paths: &[PathBuf], extensions: &[String]) -> Result<ByteText> {
        let mut files = Vec::new();
        for path in paths {
            collect(path, extensions, true, &mut files)?;
        }
        files.sort();
        files.dedup();
        let mut bytes = Vec::new();
        for file in &files {
            let content =
                std::fs::read(file).map_err(|source| DataError::Io { path: file.clone(), source })?;
            bytes.extend_from_slice(&content);
            bytes.push(b'\n');
        }
        if bytes.is_empty() {
            let why =
                "holds no file to train on; name files, or a folder and the extensions to read".to_owned();
            return Err(DataError::BadFile { path: paths.first().cloned().unwrap_or_default(), why });
        }
        Ok(ByteText { bytes })
    }

    /// From text in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> ByteText {
        ByteText { bytes }
    }
}

fn collect(path: &Path, extensions: &[String], named: bool, files: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |source| DataError::Io { path: path.to_path_buf(), source };
    let kind =
        if named { std::fs::metadata(path) } else { std::fs::symlink_metadata(path) }.map_err(failed)?;
    if kind.is_dir() {
        let mut entries: Vec<PathBuf> = std::fs::read_dir(path)
            .map_err(failed)?
            .map(|entry| entry.map(|e| e.path()))
            .collect::<Result<_, _>>()
            .map_err(failed)?;
        entries.sort();
        for entry in entries {
            let hidden = entry.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if !hidden {
                collect(&entry, extensions, false, files)?;
            }
        }
        return Ok(());
    }
    let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
    let wanted =
        named || extensions.is_empty() || extension.is_some_and(|extension| extensions.contains(&extension));
    if kind.is_file() && wanted {
        files.push(path.to_path_buf());
    }
    Ok(())
}

impl TokenStream for ByteText {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn vocabulary(&self) -> u64 {
        BYTES
    }

    fn read(&self, start: u64, out: &mut [i64]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        if end > self.len() {
            return Err(DataError::OutOfRange { start, end, len: self.len() });
        }
        let bytes = &self.bytes[start as usize..end as usize];
        out.iter_mut().zip(bytes).for_each(|(out, &byte)| *out = i64::from(byte));
        Ok(())
    }
}
