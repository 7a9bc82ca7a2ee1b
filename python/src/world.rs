//! The ranks: who this process is, groups, and collectives over tensors on the host, in place.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrospeed_comm::{Error, Group as Ranks, ReduceOp, Work, World};
use pyo3::prelude::*;

use crate::errors::{of_comm, refused};
use crate::memory::{region, sent_type};
use crate::waiting::{detached, watch_interrupts};

/// This process's membership, once it has one.
static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Adds what is here to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Group>()?;
    module.add_function(wrap_pyfunction!(init_distributed, module)?)?;
    module.add_function(wrap_pyfunction!(is_initialized, module)?)?;
    module.add_function(wrap_pyfunction!(destroy, module)?)?;
    module.add_function(wrap_pyfunction!(world_group, module)?)?;
    module.add_function(wrap_pyfunction!(new_group, module)?)?;
    module.add_function(wrap_pyfunction!(local_rank, module)?)
}

fn held() -> MutexGuard<'static, Option<World>> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The ranks; an error where nobody has met.
pub(crate) fn world() -> PyResult<World> {
    held().clone().ok_or_else(|| refused("ranks have not met yet: call ferrospeed.init_distributed() first"))
}

/// Meets the other ranks, by what a launcher left in the environment; alone where there is none. A second call changes nothing.
#[pyfunction]
fn init_distributed(py: Python<'_>) -> PyResult<()> {
    if held().is_some() {
        return Ok(());
    }
    watch_interrupts();
    let made = detached(py, ferrospeed_comm::init_distributed).map_err(of_comm)?;
    held().get_or_insert(made);
    Ok(())
}

/// Whether they have met.
#[pyfunction]
fn is_initialized() -> bool {
    held().is_some()
}

/// Leaves the job, once all engines and groups of it are gone.
#[pyfunction]
fn destroy(py: Python<'_>) {
    let left = held().take();
    detached(py, || drop(left));
}

/// The group of all ranks.
#[pyfunction]
fn world_group() -> PyResult<Group> {
    Ok(Group(world()?.group()))
}

/// This rank's number on its host.
#[pyfunction]
fn local_rank() -> PyResult<usize> {
    Ok(world()?.local_rank())
}

/// A group of some ranks; `None` on those that are not in it. All ranks of the world call it.
#[pyfunction]
fn new_group(py: Python<'_>, ranks: Vec<usize>) -> PyResult<Option<Group>> {
    let world = world()?;
    Ok(detached(py, || world.new_group(&ranks)).map_err(of_comm)?.map(Group))
}

/// Some ranks that talk among themselves.
#[pyclass(frozen, module = "ferrospeed._ferrospeed")]
pub(crate) struct Group(Ranks);

/// A tensor as Python names it: address, number of elements, type.
type Given = (usize, usize, String);

fn op(name: &str) -> PyResult<ReduceOp> {
    let found = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
    found.ok_or_else(|| {
        refused(format!(
            "'{name}' is no reduction; there are sum, avg, min, max, product, bit_and and bit_or"
        ))
    })
}

/// Waits for an operation without Python's lock.
fn wait(py: Python<'_>, work: impl FnOnce() -> Work + Send) -> PyResult<()> {
    detached(py, || -> Result<(), Error> { work().wait() }).map_err(of_comm)
}

// SAFETY of every block below: the package hands contiguous tensors on the host, keeps them until the call returns, and the
// operation is over then.
#[pymethods]
impl Group {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn ranks(&self) -> Vec<usize> {
        self.0.ranks().to_vec()
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn backend(&self) -> &'static str {
        self.0.backend()
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, || self.0.barrier_async())
    }

    fn all_reduce(&self, py: Python<'_>, data: Given, reduction: &str) -> PyResult<()> {
        let (dtype, op) = (sent_type(&data.2)?, op(reduction)?);
        // SAFETY: see above.
        let data = unsafe { region(data.0, data.1, dtype) };
        wait(py, || self.0.all_reduce_async(&data, dtype, op))
    }

    fn reduce(&self, py: Python<'_>, data: Given, reduction: &str, root: usize) -> PyResult<()> {
        let (dtype, op) = (sent_type(&data.2)?, op(reduction)?);
        // SAFETY: see above.
        let data = unsafe { region(data.0, data.1, dtype) };
        wait(py, || self.0.reduce_async(&data, dtype, op, root))
    }

    fn broadcast(&self, py: Python<'_>, data: Given, root: usize) -> PyResult<()> {
        let dtype = sent_type(&data.2)?;
        // SAFETY: see above.
        let data = unsafe { region(data.0, data.1, dtype) };
        wait(py, || self.0.broadcast_async(&data, dtype, root))
    }

    fn all_gather(&self, py: Python<'_>, input: Given, output: Given) -> PyResult<()> {
        let dtype = sent_type(&input.2)?;
        // SAFETY: see above.
        let (from, to) = unsafe { (region(input.0, input.1, dtype), region(output.0, output.1, dtype)) };
        wait(py, || self.0.all_gather_async(&from, &to, dtype))
    }

    fn reduce_scatter(&self, py: Python<'_>, input: Given, output: Given, reduction: &str) -> PyResult<()> {
        let (dtype, op) = (sent_type(&input.2)?, op(reduction)?);
        // SAFETY: see above.
        let (from, to) = unsafe { (region(input.0, input.1, dtype), region(output.0, output.1, dtype)) };
        wait(py, || self.0.reduce_scatter_async(&from, &to, dtype, op))
    }

    fn all_to_all(&self, py: Python<'_>, input: Given, output: Given) -> PyResult<()> {
        let dtype = sent_type(&input.2)?;
        // SAFETY: see above.
        let (from, to) = unsafe { (region(input.0, input.1, dtype), region(output.0, output.1, dtype)) };
        wait(py, || self.0.all_to_all_async(&from, &to, dtype))
    }

    fn send(&self, py: Python<'_>, data: Given, to: usize, tag: u64) -> PyResult<()> {
        let dtype = sent_type(&data.2)?;
        // SAFETY: see above.
        let data = unsafe { region(data.0, data.1, dtype) };
        wait(py, || self.0.send_async(&data, dtype, to, tag))
    }

    fn recv(&self, py: Python<'_>, data: Given, from: usize, tag: u64) -> PyResult<()> {
        let dtype = sent_type(&data.2)?;
        // SAFETY: see above.
        let data = unsafe { region(data.0, data.1, dtype) };
        wait(py, || self.0.recv_async(&data, dtype, from, tag))
    }

    /// Bytes of every rank, in order of rank: for objects of Python's, which the package turns into text.
    fn all_gather_bytes(&self, py: Python<'_>, own: Vec<u8>) -> PyResult<Vec<Vec<u8>>> {
        let gathered = detached(py, || -> Result<Vec<Vec<u8>>, Error> {
            let mut lengths = vec![0i64; self.0.size()];
            self.0.all_gather(&[own.len() as i64], &mut lengths)?;
            let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
            let mut all = vec![0u8; lengths.iter().sum()];
            self.0.all_gather_unequal(&own, &mut all, &lengths)?;
            let mut rest = all.as_slice();
            Ok(lengths.iter().map(|length| rest.split_off(..*length).unwrap_or_default().to_vec()).collect())
        });
        gathered.map_err(of_comm)
    }
}
