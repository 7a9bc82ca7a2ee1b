//! DeepSpeed's universal checkpoints: a folder per parameter, a file per value, whole tensors.

use std::path::{Path, PathBuf};

use ferrospeed_comm::World;

use crate::deepspeed::import::{contents, fill_groups};
use crate::deepspeed::source::natural;
use crate::error::{CheckpointError, Result};
use crate::manifest::Kind;
use crate::pt::{PtFile, StoredTensor, Unknown, Value};
use crate::save::{Target, save};
use crate::shard::PieceSpec;

/// Whether a folder is a universal checkpoint.
pub fn is_universal(path: &Path) -> bool {
    path.join("zero").is_dir()
}

/// A value of a parameter and the file that holds it.
struct Stored {
    spec: PieceSpec,
    path: PathBuf,
    tensor: StoredTensor,
}

/// Converts the universal checkpoint in the folder `path` and saves it as `target` says.
pub fn import_universal(path: &Path, unknown: Unknown, target: &Target<'_>) -> Result<PathBuf> {
    let module = PtFile::open_with(&path.join("mp_rank_00_model_states.pt"), unknown)?;
    let rest = PtFile::open_with(&path.join("zero").join("optimizer_state.pt"), unknown)?;
    let mut tensors = Vec::new();
    let mut steps = None;
    for (place, name) in parameters(path, module.value())?.into_iter().enumerate() {
        let folder = path.join("zero").join(&name);
        for file in torch_files(&folder)? {
            let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let opened = PtFile::open_with(&file, unknown)?;
            if stem == "step" {
                let own =
                    step(&opened).ok_or_else(|| CheckpointError::file(&file, "holds no number of steps"))?;
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
            let kind = if stem == "fp32" { Kind::Master } else { Kind::State(stem) };
            let spec = PieceSpec {
                name: name.clone(),
                kind,
                shape: tensor.shape.clone(),
                dtype: tensor.dtype,
                place: place as u64,
                start: 0,
                len: tensor.numel(),
            };
            tensors.push(Stored { spec, path: file, tensor });
        }
    }
    let mut contents = contents(module.value(), Some(rest.value()), steps.unwrap_or(0), 1);
    // DeepSpeed leaves out what is not trained; the module file has it.
    let count = tensors.len();
    let pairs = module.value().get("module").and_then(Value::pairs).unwrap_or_default();
    let buffers = module.value().get("buffer_names").and_then(Value::items).unwrap_or_default();
    for (index, (name, value)) in pairs.iter().enumerate() {
        let (Some(name), Some(tensor)) = (name.as_str(), value.as_tensor()) else { continue };
        let is_alias = contents.aliases.contains_key(name);
        if is_alias || tensors[..count].iter().any(|stored| stored.spec.name == name) {
            continue;
        }
        let is_buffer = buffers.iter().any(|buffer| buffer.as_str() == Some(name));
        let spec = PieceSpec {
            name: name.to_owned(),
            kind: if is_buffer { Kind::Buffer } else { Kind::Weight },
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            place: (count + index) as u64,
            start: 0,
            len: tensor.numel(),
        };
        tensors.push(Stored { spec, path: module.path().to_path_buf(), tensor: tensor.clone() });
    }
    let specs: Vec<PieceSpec> = tensors.iter().map(|stored| stored.spec.clone()).collect();
    let trained: Vec<&PieceSpec> = specs.iter().filter(|spec| spec.kind == Kind::Master).collect();
    fill_groups(&mut contents.training, module.value(), Some(rest.value()), &trained);
    let mut open: Option<(usize, PtFile)> = None;
    save(&World::solo().group(), target, contents, &specs, &mut |piece, range, out| {
        let stored = &tensors[piece];
        let file = match open.take() {
            Some((at, file)) if at == piece => file,
            _ => PtFile::open_with(&stored.path, unknown).map_err(|error| error.to_string())?,
        };
        file.read(&stored.tensor, range, out).map_err(|error| error.to_string())?;
        open = Some((piece, file));
        Ok(())
    })
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

fn step(file: &PtFile) -> Option<u64> {
    match file.value() {
        Value::Tensor(tensor) if tensor.numel() == 1 => Some(file.read_f32(tensor, 0..1).ok()?[0] as u64),
        other => other.as_u64(),
    }
}
