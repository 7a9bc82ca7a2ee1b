//! What tells the weights of one directory from those of another, for ranks that must have read the same.
//!
//! Of up to 1 GiB every byte counts; of more, 1024 blocks over all files, the first and the last among them: a change between
//! those is not seen.

use std::os::unix::fs::FileExt;

use crc32fast::Hasher;

use super::WeightFiles;
use crate::error::{ModelError, Result};

const BLOCK: u64 = 1 << 20;
const MAX_BLOCKS: u64 = 1024;

impl WeightFiles {
    /// The CRC-32 of the names, shapes and bytes.
    pub fn fingerprint(&self) -> Result<u32> {
        let mut sum = Hasher::new();
        for (name, stored) in self.tensors() {
            sum.update(format!("{name} {:?} {:?}\n", stored.dtype, stored.shape).as_bytes());
        }
        let sizes =
            self.files.iter().map(|file| Ok(file.file.metadata().map_err(ModelError::io(&file.path))?.len()));
        let sizes = sizes.collect::<Result<Vec<u64>>>()?;
        let blocks: u64 = sizes.iter().map(|bytes| bytes.div_ceil(BLOCK)).sum();
        let looked_at = blocks.min(MAX_BLOCKS);
        let mut wanted = (0..looked_at)
            .map(|index| if looked_at < 2 { 0 } else { index * (blocks - 1) / (looked_at - 1) })
            .peekable();
        let (mut first, mut block) = (0, vec![0; BLOCK as usize]);
        for (file, bytes) in self.files.iter().zip(sizes) {
            let end = first + bytes.div_ceil(BLOCK);
            while let Some(index) = wanted.next_if(|index| *index < end) {
                let start = (index - first) * BLOCK;
                let block = &mut block[..BLOCK.min(bytes - start) as usize];
                file.file.read_exact_at(block, start).map_err(ModelError::io(&file.path))?;
                sum.update(block);
            }
            first = end;
        }
        Ok(sum.finalize())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn fingerprint(path: &Path) -> u32 {
        WeightFiles::open(&[path.to_path_buf()]).unwrap().fingerprint().unwrap()
    }

    #[test]
    fn a_changed_byte_or_name_makes_other_weights() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, tensor: &str, values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let view =
                safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![values.len()], &bytes);
            let path = folder.path().join(name);
            safetensors::serialize_to_file([(tensor, view.unwrap())], None, &path).unwrap();
            path
        };
        let mut values = vec![1.0; 700_000];
        let one = fingerprint(&file("one.safetensors", "a", &values));
        assert_eq!(one, fingerprint(&file("same.safetensors", "a", &values)));
        assert_ne!(one, fingerprint(&file("name.safetensors", "b", &values)));
        for place in [0, 300_000, 699_999] {
            values[place] = 2.0;
            assert_ne!(one, fingerprint(&file("byte.safetensors", "a", &values)), "{place}");
            values[place] = 1.0;
        }
    }
}
