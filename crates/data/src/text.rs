//! Bytes in memory as tokens: for tests and small programs.

use crate::TokenStream;
use crate::error::{DataError, Result};

/// Bytes, each a token.
#[derive(Debug, Clone)]
pub struct ByteText {
    bytes: Vec<u8>,
}

impl ByteText {
    /// From text in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> ByteText {
        ByteText { bytes }
    }
}

impl TokenStream for ByteText {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn vocabulary(&self) -> Option<u64> {
        Some(256)
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

    fn place(&self, token: u64) -> String {
        format!("byte {token} of a text in memory")
    }
}
