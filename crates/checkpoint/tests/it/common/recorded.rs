//! What the tests of recorded checkpoints share: importing one, and all that it holds.

use std::path::Path;

use ferrospeed_checkpoint::deepspeed::import_deepspeed;
use ferrospeed_checkpoint::pt::Unknown;
use ferrospeed_checkpoint::{Checkpoint, Disk, Kind, Retention, Target};
use serde_json::Value;

pub(crate) fn try_imported(from: &Path, to: &Path) -> Result<Checkpoint, String> {
    let target =
        Target { dir: to, tag: "imported", update_latest: true, retention: Retention::default(), fs: &Disk };
    let path = import_deepspeed(from, None, Unknown::Refuse, &target).map_err(|error| error.to_string())?;
    Ok(Checkpoint::open(&path).unwrap())
}

pub(crate) fn values(checkpoint: &Checkpoint, kind: &Kind, name: &str) -> Vec<f32> {
    let entry = checkpoint.entry(kind, name).unwrap_or_else(|| panic!("{kind:?} of {name}"));
    let mut values = vec![0.0; entry.numel() as usize];
    checkpoint.read_f32(entry, 0..entry.numel(), &mut values).unwrap();
    values
}

pub(crate) fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

/// Every weight and moment, by kind and name.
pub(crate) fn all(checkpoint: &Checkpoint) -> Vec<(String, String, Vec<u64>, Vec<u32>)> {
    let bits = |kind: &Kind, name: &str| values(checkpoint, kind, name).iter().map(|v| v.to_bits()).collect();
    let entries = checkpoint.manifest().tensors.iter();
    let mut all: Vec<_> = entries
        .map(|entry| {
            let bits = bits(&entry.kind, &entry.name);
            (format!("{:?}", entry.kind), entry.name.clone(), entry.shape.clone(), bits)
        })
        .collect();
    all.sort();
    all
}

/// What the last step of Adam, with a rate of 0.01, has made of these weights and moments is what they were before less what
/// they are now: so the moments are this parameter's and no other's. Returns how many elements moved.
pub(crate) fn assert_made_the_last_step(
    checkpoint: &Checkpoint,
    name: &str,
    weights: &Value,
    steps: i32,
) -> usize {
    let (before, after) = (numbers(&weights["before"]), numbers(&weights["after"]));
    assert_eq!(values(checkpoint, &Kind::Master, name), after, "{name}");
    let [mean, square] =
        ["exp_avg", "exp_avg_sq"].map(|state| values(checkpoint, &Kind::State(state.to_owned()), name));
    let mut moved = 0;
    for (at, (mean, square)) in mean.iter().zip(&square).enumerate() {
        let (mean, square) = (f64::from(*mean), f64::from(*square));
        let corrected = (mean / (1.0 - 0.9f64.powi(steps)), square / (1.0 - 0.999f64.powi(steps)));
        let step = 0.01 * corrected.0 / (corrected.1.sqrt() + 1e-8);
        let found = f64::from(before[at]) - f64::from(after[at]);
        assert!((step - found).abs() < 1e-6, "{name}[{at}]: {found}, not {step}");
        moved += usize::from(found != 0.0);
    }
    moved
}
