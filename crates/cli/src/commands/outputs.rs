//! The folders that a configuration has curves written to, and whether they can be there.

use std::path::Path;

use ferrospeed_command::writable::{unmakeable, unusable};
use ferrospeed_config::Unresolved;
use serde_json::Value;

/// What is wrong with them, one line each, by the key that is to blame.
pub(super) fn problems(read: &Unresolved) -> Vec<String> {
    let text = |key: String| read.given(&key).and_then(Value::as_str).unwrap_or_default();
    let is_on = |section: &&str| read.given(&format!("{section}.enabled")) == Some(&Value::Bool(true));
    let of_monitor = |section: &str| {
        let folder = Path::new(text(format!("{section}.output_path")));
        // Without a name of its own a job has a name that does no harm.
        let job = folder.join(text(format!("{section}.job_name")));
        let key = |key: &'static str| move |why: String| format!("{section}.{key}: {why}");
        cannot_be(folder).map(key("output_path")).or_else(|| cannot_be(&job).map(key("job_name")))
    };
    let monitors = ["tensorboard", "csv_monitor"].into_iter().filter(is_on).filter_map(of_monitor);
    let wandb = Some("wandb").filter(is_on).and_then(|section| {
        cannot_be(Path::new(text(format!("{section}.dir")))).map(|why| format!("{section}.dir: {why}"))
    });
    monitors.chain(wandb).collect()
}

/// Why a folder can neither be written to nor made; an empty one is the folder that the command is run in.
fn cannot_be(folder: &Path) -> Option<String> {
    unusable(folder).or_else(|| unmakeable(folder)).filter(|_| !folder.as_os_str().is_empty())
}
