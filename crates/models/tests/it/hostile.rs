//! Damaged weight files: each is read or refused, and none makes the reader panic or allocate what its header claims.

use ferrospeed_models::weights::WeightFiles;
use ferrospeed_testkit::golden::golden;
use ferrospeed_testkit::property::{Random, seeds};

#[test]
fn damaged_safetensors_are_read_or_refused() {
    let Some(path) = golden().path("models/llama/model.safetensors") else { return };
    let whole = std::fs::read(path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let mut opened = 0;
    for seed in seeds(500) {
        let (mut random, mut head) = (Random(seed), whole[..header].to_vec());
        random.damage(&mut head);
        std::fs::write(&file, [&head, &whole[header..]].concat()).unwrap();
        let Ok(weights) = WeightFiles::open(std::slice::from_ref(&file)) else { continue };
        opened += 1;
        for stored in weights.tensors().values() {
            let _ = weights.bytes(stored);
        }
    }
    println!("{opened} damaged files still made sense");
}
