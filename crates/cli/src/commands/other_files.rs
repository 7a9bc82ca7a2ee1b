//! What people hand to `train` that is no recipe, as other programs are handed it, and what to do with it here.

use std::path::Path;

use ferrospeed_command::Failure;

/// Refuses what is no recipe by its name, and says what is done with it.
pub(super) fn check(path: &Path) -> Result<(), Failure> {
    if path.is_dir() {
        return Err(Failure::Usage(of_folder(path)));
    }
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let file = path.display();
    let why = match extension.to_ascii_lowercase().as_str() {
        "json" => format!(
            "{file} is a ds_config and no recipe, which also says which model is trained on which data; write one that names it, {}.toml:\n\n{}\n\
             then `ferrospeed train {}.toml` (or `ferrospeed config check {file}`, `ferrospeed plan {file} --model DIR` for the file alone)",
            stem(path),
            recipe_of(path),
            stem(path),
        ),
        "py" => format!(
            "{file} is a Python script, and `train` takes a recipe (TOML); start it on several ranks with\n  ferrospeed launch -n 2 --python -- {file} …"
        ),
        "yml" | "yaml" => format!(
            "{file} is YAML, and a recipe is TOML; `ferrospeed init --from {file}` writes a recipe of what it says, if it is Axolotl's or accelerate's"
        ),
        "sh" => format!(
            "{file} is a script of a shell, and `train` takes a recipe (TOML); run it itself, or `ferrospeed launch -n 2 -- sh {file}`"
        ),
        "gguf" | "safetensors" => format!(
            "{file} holds weights, and `train` takes a recipe (TOML), whose model.path names the directory of a model"
        ),
        "jsonl" | "parquet" | "txt" => format!(
            "{file} is data, and `train` takes a recipe (TOML), whose [data] names it; recipes/chat.toml and recipes/quickstart.toml are some to begin with"
        ),
        _ => return Ok(()),
    };
    Err(Failure::Usage(why))
}

/// A run that was stopped, or a model, given as if it were a recipe.
fn of_folder(path: &Path) -> String {
    let folder = path.display();
    if path.join("config/recipe.toml").is_file() {
        return format!(
            "{folder} is the folder of a run; its recipe is in it: ferrospeed train {folder}/config/recipe.toml (with --resume to go on with it)"
        );
    }
    if path.join("config.json").is_file() {
        return format!(
            "{folder} is a model, and `train` takes a recipe (TOML), whose model.path names it; recipes/finetune-hf.toml is one to begin with"
        );
    }
    format!("{folder} is a folder, and `train` takes a recipe (TOML)")
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "recipe".to_owned(), |stem| stem.to_string_lossy().into_owned())
}

/// The smallest recipe around a ds_config.
fn recipe_of(path: &Path) -> String {
    format!(
        "  name = \"{}\"\n  steps = 1000\n  ds_config = \"{}\"\n  [model]\n  path = \"org/name\"          # a directory, or a name on the Hugging Face Hub\n  [data]\n  \
         samples = [\"chats.jsonl\"] # or text = [\"folder\"], or hub = \"org/name\"\n  sequence = 1024\n",
        stem(path),
        path.display()
    )
}
