//! Torch files with something in them changed.

use std::collections::BTreeMap;
use std::path::Path;

use ferrospeed_checkpoint::pt::{PtFile, StorageToWrite, StoredTensor, Value, write_pt};

/// Writes a file again with another value, of the same tensors.
pub(crate) fn rewrite(path: &Path, change: impl Fn(&Value) -> Value) {
    fn storages_of(value: &Value, storages: &mut BTreeMap<usize, StoredTensor>) {
        match value {
            Value::Dict(pairs) | Value::OrderedDict(pairs) => {
                pairs.iter().for_each(|(_, value)| storages_of(value, storages));
            }
            Value::List(items) | Value::Tuple(items) => {
                items.iter().for_each(|item| storages_of(item, storages));
            }
            Value::Tensor(tensor) => {
                let mut whole = tensor.clone();
                (whole.offset, whole.shape, whole.stride) = (0, vec![tensor.storage_numel], vec![1]);
                storages.insert(tensor.storage.parse().unwrap(), whole);
            }
            _ => {}
        }
    }
    let original = PtFile::open(path).unwrap();
    let mut storages = BTreeMap::new();
    storages_of(original.value(), &mut storages);
    let storages: Vec<StoredTensor> = storages.into_values().collect();
    let to_write: Vec<StorageToWrite> =
        storages.iter().map(|one| StorageToWrite { dtype: one.dtype, numel: one.storage_numel }).collect();
    let beside = path.with_extension("changed");
    write_pt(&beside, &change(original.value()), &to_write, &mut |storage, range, out| {
        original.read(&storages[storage], range, out)
    })
    .unwrap();
    std::fs::rename(beside, path).unwrap();
}

/// A dictionary with another value for a key, or without it.
pub(crate) fn with(value: &Value, key: &str, other: Option<Value>) -> Value {
    let kept = value.pairs().unwrap().iter().filter(|(name, _)| name.as_str() != Some(key)).cloned();
    Value::Dict(kept.chain(other.map(|other| (Value::str(key), other))).collect())
}

/// Makes a module file what Hugging Face's Trainer has DeepSpeed write: its configuration has no optimizer and never prints, and its
/// schedule is torch's, which has made so many steps.
pub(crate) fn as_the_trainer_writes(path: &Path, steps: u64) {
    rewrite(path, |module| {
        let config = with(module.get("ds_config").unwrap(), "optimizer", None);
        let config = with(&config, "steps_per_print", Some(Value::Float(f64::INFINITY)));
        let schedule = Value::dict([
            ("base_lrs", Value::List(vec![Value::Float(1e-3); 2])),
            ("last_epoch", Value::Int(steps.into())),
            ("verbose", Value::Bool(false)),
            ("lr_lambdas", Value::List(vec![Value::dict([]), Value::dict([])])),
        ]);
        with(&with(module, "ds_config", Some(config)), "lr_scheduler", Some(schedule))
    });
}
