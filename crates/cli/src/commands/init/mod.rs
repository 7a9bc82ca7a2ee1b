//! `ferrospeed init --from FILE`: a recipe of what another program's file says. What is understood is translated; what is not stands in
//! the recipe as a list, with what to do about it, so that nothing is lost without a word.

mod accelerate;
mod axolotl;
mod draft;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::terminal::{print_note, print_output};
use ferrospeed_command::{Failure, writable};
use saphyr::{LoadableYamlNode, Scalar, Yaml};
use serde_json::{Map, Number, Value};

use draft::Draft;

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// The file: Axolotl's or accelerate's YAML
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// Write the recipe there instead of to the terminal
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Such files are written by hand.
const MAX_BYTES: u64 = 1 << 20;
/// What is repeated by a name could be repeated without an end that memory would see.
const MOST_ANCHORS: usize = 2;

pub(crate) fn run(args: &InitArgs) -> Result<ExitCode, Failure> {
    let refuse = |why: String| Failure::Usage(format!("{}: {why}", args.from.display()));
    let text =
        ferrospeed_files::read_text(&args.from, MAX_BYTES).map_err(|error| refuse(error.to_string()))?;
    let draft = translate(&text, &args.from).map_err(refuse)?;
    let recipe = draft.to_recipe(&args.from);
    match &args.out {
        None => print_output(&recipe)?,
        Some(out) => {
            if out.symlink_metadata().is_ok() {
                return Err(Failure::Usage(format!(
                    "--out: {} is there already; choose another name",
                    out.display()
                )));
            }
            if let Some(why) = writable::impossible(out) {
                return Err(Failure::Usage(format!("--out: {why}")));
            }
            ferrospeed_files::write(out, recipe)
                .map_err(|error| Failure::Run(format!("{}: {error}", out.display())))?;
        }
    }
    if !draft.left.is_empty() {
        print_note(&format!(
            "{} key(s) were not translated; the recipe begins with the list",
            draft.left.len()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// What a file says, as far as it can be said here.
fn translate(text: &str, path: &Path) -> Result<Draft, String> {
    if text.matches(" &").count() > MOST_ANCHORS {
        return Err("repeats parts by name (&…); write them out".to_owned());
    }
    let documents = Yaml::load_from_str(text).map_err(|error| format!("is no YAML: {error}"))?;
    let Some(Value::Object(keys)) = documents.first().map(value_of) else {
        return Err("holds no keys".to_owned());
    };
    let name = path.file_stem().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    if keys.contains_key("distributed_type") || keys.contains_key("compute_environment") {
        return Ok(accelerate::translate(&keys, &name));
    }
    if keys.contains_key("base_model") || keys.contains_key("datasets") {
        return Ok(axolotl::translate(&keys, &name));
    }
    Err("is neither Axolotl's (base_model, datasets) nor accelerate's (distributed_type)".to_owned())
}

fn value_of(yaml: &Yaml<'_>) -> Value {
    match yaml {
        Yaml::Value(Scalar::Boolean(value)) => (*value).into(),
        Yaml::Value(Scalar::Integer(value)) => (*value).into(),
        Yaml::Value(Scalar::FloatingPoint(value)) => {
            Number::from_f64(**value).map_or(Value::Null, Value::Number)
        }
        Yaml::Value(Scalar::String(text)) => text.as_ref().into(),
        Yaml::Sequence(items) => items.iter().map(value_of).collect(),
        Yaml::Mapping(entries) => {
            let name = |key: &Yaml<'_>| match value_of(key) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            entries.iter().map(|(key, value)| (name(key), value_of(value))).collect::<Map<_, _>>().into()
        }
        Yaml::Tagged(_, inner) => value_of(inner),
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe_of(text: &str) -> (String, Draft) {
        let draft = translate(text, Path::new("mine.yml")).unwrap();
        (draft.to_recipe(Path::new("mine.yml")), draft)
    }

    /// What `train` would say of it.
    fn problems(recipe: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recipe.toml");
        std::fs::write(&path, recipe).unwrap();
        ferrospeed_train::Recipe::load(&path, &[]).unwrap().problems()
    }

    #[test]
    fn axolotls_file_becomes_a_recipe_and_what_is_left_is_listed() {
        let (recipe, draft) = recipe_of(include_str!("axolotl.yml"));
        let expected = include_str!("axolotl.toml");
        assert_eq!(recipe, expected, "{recipe}");
        assert_eq!(problems(&recipe), Vec::<String>::new());
        let left: Vec<&str> = draft.left.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(left, ["load_in_4bit", "xformers_of_my_own"]);
    }

    #[test]
    fn accelerates_file_becomes_a_ds_config() {
        let (recipe, _) = recipe_of(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\n\
             deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 2\n  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n  offload_param_device: none\n  zero3_init_flag: true\n",
        );
        for line in [
            "ranks = 4",
            "zero_optimization = { stage = 3, offload_optimizer = { device = \"cpu\" } }",
            "gradient_accumulation_steps = 2",
            "bf16 = { enabled = true }",
        ] {
            assert!(recipe.lines().any(|found| found == line), "{line}: {recipe}");
        }
        assert_eq!(problems(&recipe), Vec::<String>::new());
    }

    #[test]
    fn what_is_neither_is_refused() {
        let refused = |text: &str| translate(text, Path::new("a.yml")).map(|_| ()).unwrap_err();
        assert!(refused("a: 1").contains("neither Axolotl's"));
        assert!(refused("- 1").contains("holds no keys"));
        assert!(refused("a: [").contains("is no YAML"));
        assert!(refused("a: &a 1\nb: &b 2\nc: &c 3").contains("repeats parts by name"));
    }
}
