//! A rank of `mpirun` notices that this was killed, and leaves.
//!
//! Our own launcher's ranks die with it. `mpirun` ends its ranks when it ends in order; killed, it leaves them training on
//! for nobody. Ranks that were started by hand may outlive their shell, so only those that MPI's variables speak of watch.

use std::os::unix::process::parent_id;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferrospeed_command::Failure;
use ferrospeed_command::terminal::print_error;

/// Variables that only a launcher of MPI sets.
const OF_MPI: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Who started this process; `None` where nobody of concern did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Starter(Option<u32>);

impl Starter {
    /// Of this process; asked as early as can be, for who is gone already cannot be told from who takes orphans in.
    pub(super) fn of_this_process() -> Starter {
        let is_of_mpi = OF_MPI.iter().any(|name| std::env::var_os(name).is_some());
        Starter(is_of_mpi.then(parent_id))
    }

    /// Why the run ends, where the starter is gone. Its output may be gone too: whoever holds the run's folder writes it there.
    pub(super) fn is_gone(self) -> Option<String> {
        self.0.filter(|starter| parent_id() != *starter).map(gone)
    }

    /// From now on sets `leave`, once, when the starter is gone.
    pub(super) fn watch(self, leave: &Arc<AtomicBool>) -> Result<(), Failure> {
        let Starter(Some(starter)) = self else { return Ok(()) };
        let leave = Arc::clone(leave);
        let watching = move || {
            while parent_id() == starter {
                std::thread::sleep(LOOK_EVERY);
            }
            leave.store(true, Ordering::SeqCst);
            print_error(&gone(starter));
        };
        let spawned = std::thread::Builder::new().name("starter".into()).spawn(watching);
        spawned
            .map(drop)
            .map_err(|error| Failure::Run(format!("cannot watch for the end of the launcher: {error}")))
    }
}

fn gone(starter: u32) -> String {
    format!("process {starter}, which started this rank, is gone: the run saves and ends; --resume goes on")
}
