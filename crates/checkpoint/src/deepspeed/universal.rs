//! DeepSpeed's universal checkpoints: a folder per parameter, a file per value, whole tensors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::deepspeed::foreign::{Foreign, Tensor, Understood};
use crate::deepspeed::import::{contents, fill_groups};
use crate::deepspeed::source::{Stretch, natural, open_own, shapes, whole};
use crate::error::{CheckpointError, Result};
use crate::manifest::Kind;
use crate::pt::{PtFile, Unknown, Value};
use crate::save::Target;
use crate::shard::PieceSpec;

/// Whether a folder is a universal checkpoint.
pub fn is_universal(path: &Path) -> bool {
    path.join("zero").is_dir()
}

/// Converts the universal checkpoint in the folder `path` and saves it as `target` says.
pub fn import_universal(path: &Path, unknown: Unknown, target: &Target<'_>) -> Result<PathBuf> {
    Foreign::open(path, unknown)?.save(target)
}

/// What the universal checkpoint in the folder `path` holds, and where.
pub(super) fn understand(path: &Path, unknown: Unknown) -> Result<Understood> {
    let module = open_own(&module_file(path)?, unknown)?;
    let rest = open_own(&path.join("zero").join("optimizer_state.pt"), unknown)?;
    let known = contents(module.value(), Some(rest.value()), 0, 1);
    let mut files = vec![module.path().to_path_buf()];
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut steps = None;
    let mut names = parameters(path, module.value())?;
    let groups = module.value().get("param_shapes").and_then(Value::items).unwrap_or_default();
    let shapes: HashMap<String, Vec<u64>> = groups.iter().filter_map(shapes).flatten().collect();
    // A tied parameter may have a folder under each of its names.
    names.retain(|name| !known.aliases.contains_key(name));
    for (place, name) in names.into_iter().enumerate() {
        let folder = path.join("zero").join(&name);
        for file in torch_files(&folder)? {
            let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let opened = open_own(&file, unknown)?;
            if stem == "step" {
                let own = opened.read_count(opened.value())?;
                if *steps.get_or_insert(own) != own {
                    return Err(CheckpointError::file(
                        &file,
                        format!("says {own} steps, other parameters say others"),
                    ));
                }
                continue;
            }
            let tensor = opened.value().get("param").and_then(Value::as_tensor);
            let tensor =
                tensor.ok_or_else(|| CheckpointError::file(&file, "holds no tensor 'param'"))?.clone();
            // ZeRO-3's are flat, with the padding of its shares at the end.
            let listed = shapes.get(&name).filter(|shape| tensor.shape.len() == 1 && shape.len() != 1);
            let shape = listed.unwrap_or(&tensor.shape).clone();
            let len = shape.iter().try_fold(1u64, |numel, size| numel.checked_mul(*size));
            let len = len.filter(|len| *len <= tensor.numel()).ok_or_else(|| {
                CheckpointError::file(&file, format!("holds {} elements, not {shape:?}", tensor.numel()))
            })?;
            let kind = if stem == "fp32" { Kind::Master } else { Kind::State(stem) };
            let spec = PieceSpec {
                name: name.clone(),
                kind,
                shape,
                dtype: tensor.dtype,
                place: place as u64,
                part: None,
                start: 0,
                len,
            };
            let stretch = Stretch { len, ..whole(files.len(), &tensor) };
            tensors.push(Tensor { spec, stretches: vec![stretch] });
            files.push(file);
        }
    }
    let mut contents = known;
    contents.training.optimizer_steps = match steps {
        Some(steps) => steps,
        None => step_of_all(&rest)?.unwrap_or(0),
    };
    // DeepSpeed leaves out what is not trained; the module file has it.
    let count = tensors.len();
    let pairs = module.value().get("module").and_then(Value::pairs).unwrap_or_default();
    let buffers = module.value().get("buffer_names").and_then(Value::items).unwrap_or_default();
    for (index, (name, value)) in pairs.iter().enumerate() {
        let (Some(name), Some(tensor)) = (name.as_str(), value.as_tensor()) else { continue };
        let is_alias = contents.aliases.contains_key(name);
        if is_alias || tensors[..count].iter().any(|tensor| tensor.spec.name == name) {
            continue;
        }
        let is_buffer = buffers.iter().any(|buffer| buffer.as_str() == Some(name));
        let spec = PieceSpec {
            name: name.to_owned(),
            kind: if is_buffer { Kind::Buffer } else { Kind::Weight },
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            place: (count + index) as u64,
            part: None,
            start: 0,
            len: tensor.numel(),
        };
        tensors.push(Tensor { spec, stretches: vec![whole(0, tensor)] });
    }
    let trained: Vec<&PieceSpec> =
        tensors.iter().map(|tensor| &tensor.spec).filter(|spec| spec.kind == Kind::Master).collect();
    fill_groups(&mut contents.training, module.value(), Some(rest.value()), &trained);
    Ok((contents, tensors, files))
}

/// The file with what is no tensor of its own: named after the first rank where ZeRO-3 wrote it.
fn module_file(path: &Path) -> Result<PathBuf> {
    let names = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"];
    let found = names.iter().map(|name| path.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| CheckpointError::file(path, format!("has neither {} nor {}", names[0], names[1])))
}

/// The number of steps where it is kept once for all parameters, as ZeRO-3 does.
fn step_of_all(rest: &PtFile) -> Result<Option<u64>> {
    let states = rest.value().get("optimizer_state_dict").and_then(|all| all.get("state"));
    let first = states.and_then(Value::pairs).and_then(<[_]>::first);
    first.and_then(|(_, state)| state.get("step")).map(|step| rest.read_count(step)).transpose()
}

/// Parameters in the order of the module file, then those that only have a folder.
fn parameters(path: &Path, module: &Value) -> Result<Vec<String>> {
    let zero = path.join("zero");
    let listing = std::fs::read_dir(&zero).map_err(CheckpointError::io("list", &zero))?;
    let mut folders: Vec<String> = listing
        .filter_map(|entry| entry.ok().filter(|entry| entry.path().is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    folders.sort_by(|a, b| natural(a, b));
    let groups = module.get("param_shapes").and_then(Value::items).unwrap_or_default();
    let listed = groups.iter().flat_map(|group| group.pairs().unwrap_or_default());
    let listed: Vec<String> = listed.filter_map(|(name, _)| name.as_str().map(str::to_owned)).collect();
    if let Some(missing) = listed.iter().find(|name| !folders.contains(name)) {
        return Err(CheckpointError::file(&zero, format!("has no folder for '{missing}'")));
    }
    folders.retain(|folder| !listed.contains(folder));
    Ok(listed.into_iter().chain(folders).collect())
}

fn torch_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let listing = std::fs::read_dir(folder).map_err(CheckpointError::io("list", folder))?;
    let mut files: Vec<PathBuf> = listing.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "pt"));
    files.sort();
    Ok(files)
}
