//! `ferrospeed checkpoint diff`: in what two checkpoints differ.

use std::path::Path;
use std::process::ExitCode;

use ferrospeed_checkpoint::{Checkpoint, CheckpointError, TensorEntry, of_run, resolve_newest};
use ferrospeed_command::{Failure, terminal};

/// Compares two checkpoints tensor by tensor, and what else they hold.
pub(super) fn diff(first: &Path, second: &Path) -> Result<ExitCode, Failure> {
    let (first, second) = (open(first)?, open(second)?);
    let mut text = String::new();
    let mut note = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    for tensor in &first.manifest().tensors {
        let what = format!("{} ({})", tensor.name, tensor.kind);
        let Some(other) = second.entry(&tensor.kind, &tensor.name) else {
            note(format!("only in the first   {what}"));
            continue;
        };
        if (&tensor.shape, tensor.dtype) != (&other.shape, other.dtype) {
            note(format!(
                "{what}: {:?} {:?} and {:?} {:?}",
                tensor.dtype, tensor.shape, other.dtype, other.shape
            ));
            continue;
        }
        let differing = count_differences(&first, tensor, &second, other)?;
        if differing > 0 {
            note(format!("{what}: {differing} of {} elements differ", tensor.numel()));
        }
    }
    for tensor in &second.manifest().tensors {
        if first.entry(&tensor.kind, &tensor.name).is_none() {
            note(format!("only in the second  {} ({})", tensor.name, tensor.kind));
        }
    }
    let [one, other] = [&first, &second].map(|checkpoint| serde_json::json!(checkpoint.manifest().training));
    differences("", &one, &other, &mut note);
    let same = text.is_empty();
    terminal::print_output(if same { "the same\n" } else { &text })?;
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The checkpoint that is meant by a folder.
fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&resolve_newest(&of_run(dir), None)?)
}

/// Notes the counters, and the parts of schedule, loss scale and groups, that differ.
fn differences(at: &str, one: &serde_json::Value, other: &serde_json::Value, note: &mut impl FnMut(String)) {
    use serde_json::Value::{Array, Null, Object};
    let below = |name: &str| if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") };
    match (one, other) {
        (Object(ones), Object(others)) => {
            let only_there = others.keys().filter(|key| !ones.contains_key(*key));
            for key in ones.keys().chain(only_there) {
                let value = |of: &serde_json::Map<_, _>| of.get(key).cloned().unwrap_or(Null);
                differences(&below(key), &value(ones), &value(others), note);
            }
        }
        (Array(ones), Array(others)) if ones.len() == others.len() => {
            let pairs = ones.iter().zip(others).enumerate();
            pairs.for_each(|(at, (one, other))| differences(&below(&at.to_string()), one, other, note));
        }
        _ if one != other => note(format!("{at}: {one} and {other}")),
        _ => {}
    }
}

/// Elements that differ, read a stretch at a time.
fn count_differences(
    first: &Checkpoint,
    one: &TensorEntry,
    second: &Checkpoint,
    other: &TensorEntry,
) -> Result<u64, CheckpointError> {
    const STEP: u64 = 1 << 20;
    let size = one.dtype.size_bytes() as usize;
    let mut differing = 0;
    let mut at = 0;
    while at < one.numel() {
        let end = (at + STEP).min(one.numel());
        let (mut a, mut b) = (Vec::new(), Vec::new());
        first.read_bytes(one, at..end, &mut a)?;
        second.read_bytes(other, at..end, &mut b)?;
        differing += a.chunks_exact(size).zip(b.chunks_exact(size)).filter(|(a, b)| a != b).count() as u64;
        at = end;
    }
    Ok(differing)
}
