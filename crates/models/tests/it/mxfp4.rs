//! Stacks of experts in MXFP4 have the values that transformers gives them.

use ferrospeed_models::weights::WeightFiles;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Initializer, Param};
use ferrospeed_testkit::golden::repository_root;
use ferrospeed_testkit::tensors;

#[test]
fn stacks_are_widened_exactly_whole_and_in_ranges() {
    let path = repository_root().join("crates/models/tests/mxfp4.safetensors");
    let recorded = tensors::read(&path);
    // Beside the packed ones the file has the values, under the names that packed ones are read for: those are taken out.
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("packed.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let only =
        all.tensors().into_iter().filter(|(name, _)| name.ends_with("_blocks") || name.ends_with("_scales"));
    safetensors::serialize_to_file(only.collect::<Vec<_>>(), None, &packed).unwrap();
    let weights = WeightFiles::open(&[packed]).unwrap();
    for name in ["gate_up_proj", "down_proj"] {
        let expected = &recorded[name];
        let param = Param::new(name, expected.shape.as_slice(), Initializer::Constant(0.0));
        let mut found = vec![f32::NAN; param.numel()];
        weights.load(&param, 0..found.len(), &mut found).unwrap();
        assert_eq!(found, expected.floats(), "{name}");
        // A rank's part begins anywhere, in one expert and goes on in the next.
        let part = 7..param.numel() - 5;
        let mut found = vec![f32::NAN; part.len()];
        weights.load(&param, part.clone(), &mut found).unwrap();
        assert_eq!(found, expected.floats()[part], "{name}");
        weights.check(std::slice::from_ref(&param)).unwrap_err();
        let other = Param::new(name, [1, 2, 3], Initializer::Constant(0.0));
        let error = weights.load(&other, 0..6, &mut [0.0; 6]).unwrap_err().to_string();
        assert!(error.contains("which is no stack"), "{error}");
    }
}
