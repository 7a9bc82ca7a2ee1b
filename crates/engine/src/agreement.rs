//! Ranks that were told or have read different things, or run different programs, say so before the first collective: nothing
//! after it would show that they train different models together.

use std::fs::File;
use std::io::Read;
use std::sync::OnceLock;

use ferrospeed_comm::Group;
use serde_json::{Value, json};

use crate::error::{EngineError, Result};
use crate::setup::Setup;

/// Every rank must have rank 0's configuration, seed, files and program. All ranks call it together, and all get the same
/// error.
pub(crate) fn agree(setup: &Setup) -> Result<()> {
    agree_with_scheduler(setup)?;
    let group = setup.world.group();
    if group.size() == 1 {
        return Ok(());
    }
    let told = json!({
        "seed": setup.seed,
        "config": setup.config.to_json(),
        "read": setup.read,
        "program": program(),
        // Another processor groups sums otherwise, so what ranks compute each for itself would drift apart.
        "kernels (FERROSPEED_CPU_KERNELS)": setup.device.backend().kernels(),
    });
    let own = [setup.config.canonical_hash() as i64, i64::from(crc32fast::hash(told.to_string().as_bytes()))];
    let mut all = vec![0i64; own.len() * group.size()];
    group.all_gather(&own, &mut all)?;
    let Some(other) = all.chunks(own.len()).position(|theirs| theirs != &all[..own.len()]) else {
        return Ok(());
    };
    let (first, other_told) = (told_by(&group, 0, &told)?, told_by(&group, other, &told)?);
    let (path, left, right) = difference("", &first, &other_told).unwrap_or_default();
    Err(EngineError::Disagreement { rank: other, what: path, there: right, here: left })
}

/// A scheduler that planned with another elasticity section starts numbers of ranks that do not fit; it hands on its own.
fn agree_with_scheduler(setup: &Setup) -> Result<()> {
    let handed_on = std::env::var_os("DEEPSPEED_ELASTICITY_CONFIG");
    let (Some(elasticity), Some(section)) = (&setup.config.elasticity, handed_on) else { return Ok(()) };
    let agreed = elasticity.agree_with_scheduler(&section.to_string_lossy());
    agreed.map_err(|error| EngineError::Argument { what: "elasticity", why: error.to_string() })
}

/// Which program a rank is: another build of the same version may compute other bits.
fn program() -> &'static Value {
    static PROGRAM: OnceLock<Value> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let build = if cfg!(debug_assertions) { "debug" } else { "release" };
        // Where a system does not say what runs, version and build must do.
        let executable = checksum_of("/proc/self/exe").ok();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "build": build,
            "executable": executable.map(|checksum| format!("{checksum:08x}")),
        })
    })
}

fn checksum_of(path: &str) -> std::io::Result<u32> {
    let (mut file, mut sum, mut chunk) = (File::open(path)?, crc32fast::Hasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(sum.finalize()),
            count => sum.update(&chunk[..count]),
        }
    }
}

/// What one rank was told, on every rank.
fn told_by(group: &Group, rank: usize, own: &Value) -> Result<Value> {
    let mut text = own.to_string().into_bytes();
    let mut length = [text.len() as i64];
    group.broadcast(&mut length, rank)?;
    text.resize(usize::try_from(length[0]).unwrap_or(0), 0);
    group.broadcast(&mut text, rank)?;
    Ok(serde_json::from_slice(&text).unwrap_or_default())
}

/// The first path at which two values differ, and what is there in each.
fn difference(path: &str, left: &Value, right: &Value) -> Option<(String, String, String)> {
    if left == right {
        return None;
    }
    if let (Value::Object(first), Value::Object(second)) = (left, right) {
        let keys = first.keys().chain(second.keys().filter(|key| !first.contains_key(*key)));
        return keys
            .filter_map(|key| {
                let path = match path {
                    // The configuration's own keys are what its author knows.
                    "" | "config" | "read" => key.clone(),
                    _ => format!("{path}.{key}"),
                };
                difference(
                    &path,
                    first.get(key).unwrap_or(&Value::Null),
                    second.get(key).unwrap_or(&Value::Null),
                )
            })
            .next();
    }
    Some((path.to_owned(), left.to_string(), right.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_by_its_key() {
        let told = |lr: f64| json!({"seed": 1, "config": {"optimizer": {"params": {"lr": lr}}, "z": lr}});
        let found = difference("", &told(0.1), &told(0.2));
        assert_eq!(found, Some(("optimizer.params.lr".into(), "0.1".into(), "0.2".into())));
        assert_eq!(difference("", &told(0.1), &told(0.1)), None);
        let missing = difference("", &json!({"seed": 1}), &json!({}));
        assert_eq!(missing, Some(("seed".into(), "1".into(), "null".into())));
    }
}
