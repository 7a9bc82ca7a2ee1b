//! The weights alone, as kernels read them, in one torch file.

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::pt::{TensorTable, Value, write_pt};
use ferrospeed_checkpoint::{CheckpointError, Result as CheckpointResult, agree};
use ferrospeed_tensor::Param;

use super::stored_type;
use crate::engine::Engine;
use crate::error::Result;

impl Engine {
    /// Writes `dir/name` (DeepSpeed's name is `pytorch_model.bin`): every weight in the type that kernels read, which is
    /// 16 bits wide unless the run is in fp32. Rank 0 writes, one tensor in memory at a time; all ranks call it together.
    pub fn save_16bit_model(&mut self, dir: &Path, name: &str, exclude_frozen: bool) -> Result<PathBuf> {
        self.check_whole("save_16bit_model")?;
        let path = dir.join(name);
        let trained = |param: &&Param| param.is_trainable() || !exclude_frozen;
        let params: Vec<Param> = self.store.params().iter().filter(trained).cloned().collect();
        let group = self.world.group();
        let mut gathered = 0;
        let written =
            if group.rank() == 0 { self.write_weights(&path, &params, &mut gathered) } else { Ok(()) };
        // Whatever happened on rank 0, its peers gather every parameter, and so does it.
        let rest = params[gathered..].iter().try_for_each(|param| self.read_whole(param).map(drop));
        agree(&group, written.and(rest))?;
        Ok(path)
    }

    fn write_weights(&self, path: &Path, params: &[Param], gathered: &mut usize) -> CheckpointResult<()> {
        let dtype = stored_type(self.store.dtype());
        let mut table = TensorTable::default();
        let mut pairs: Vec<(Value, Value)> = Vec::with_capacity(params.len());
        for param in params {
            let shape: Vec<u64> = param.whole_shape().sizes().iter().map(|size| *size as u64).collect();
            pairs.push((Value::str(param.name()), table.tensor(dtype, &shape)));
        }
        for (alias, name) in &self.aliases {
            let tied =
                pairs.iter().find(|(known, _)| known.as_str() == Some(name)).map(|(_, value)| value.clone());
            pairs.extend(tied.map(|value| (Value::str(alias), value)));
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|source| CheckpointError::Io {
                what: "create",
                path: PathBuf::from(folder),
                source,
            })?;
        }
        let mut open: Option<(usize, Vec<f32>)> = None;
        write_pt(path, &Value::OrderedDict(pairs), &table.storages, &mut |storage, range, out| {
            let values = match open.take() {
                Some((at, values)) if at == storage => values,
                _ => {
                    *gathered = storage + 1;
                    self.read_whole(&params[storage])?
                }
            };
            let part = &values[range.start as usize..range.end as usize];
            let appended = dtype.append_f32(part, out);
            appended
                .ok_or_else(|| CheckpointError::Request(format!("weights of {dtype:?} are no floats")))?;
            open = Some((storage, values));
            Ok(())
        })
    }

    fn read_whole(&self, param: &Param) -> CheckpointResult<Vec<f32>> {
        let values = self.weight_as_read(param);
        values.map_err(|error| CheckpointError::Request(format!("'{}': {error}", param.name())))
    }
}
