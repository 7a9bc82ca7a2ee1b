//! Loading a sharded model takes the memory of the model and one tensor, and all of it is given back with the model.
//! It measures the process, which it has to itself.

use ferrospeed_models::directory::{WriteOptions, create};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tensor::DType;
use ferrospeed_tensor::store::PlainStore;
use ferrospeed_testkit::child;

/// The most memory this process held since the last reset.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux counts it");
    line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() << 10
}

#[test]
fn loading_takes_the_model_and_one_tensor_and_dropping_gives_it_back() {
    if !child::has_process_alone(
        module_path!(),
        "loading_takes_the_model_and_one_tensor_and_dropping_gives_it_back",
    ) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("model");
    let sizes = PresetSizes {
        layers: Some(6),
        width: Some(512),
        heads: None,
        vocabulary: 16384,
        sequence: 64,
        dropout: 0.0,
    };
    let config = Preset::Llama.config(&sizes);
    let written =
        create(&place, &config, 1, &WriteOptions { dtype: None, max_shard_bytes: 24 << 20 }).unwrap();
    assert!(written.files > 3 && written.bytes > 100 << 20, "{written:?}");
    for dtype in [DType::BF16, DType::F32] {
        let model = ModelConfig::from_directory(&place, WindowRule::default()).unwrap();
        let params = model.parameters();
        // Forget the peak of writing: 5 resets it to what is held now.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before_bytes = peak_bytes();
        let weights = WeightFiles::open_directory(&place).unwrap();
        weights.check(params.as_slice()).unwrap();
        let device = ferrospeed_cpu::with_threads(1);
        let store = PlainStore::attach(params.as_slice(), dtype, &device, &weights).unwrap();
        let model_bytes = store.flat().numel() * dtype.size_bytes();
        let largest_bytes = params.as_slice().iter().map(|param| 4 * param.numel()).max().unwrap();
        let taken_bytes = peak_bytes() - before_bytes;
        assert!(
            taken_bytes <= model_bytes + largest_bytes,
            "{dtype}: loading took {taken_bytes} bytes for a model of {model_bytes} and a tensor of {largest_bytes}"
        );
        assert!(device.memory_usage().current_total() >= model_bytes);
        drop((store, params, model));
        assert_eq!(device.memory_usage().current_total(), 0, "{dtype}: nobody holds the model any more");
    }
}
