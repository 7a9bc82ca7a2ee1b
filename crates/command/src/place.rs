//! Who this process is, for commands that either start ranks or are one.

use ferrospeed_comm::ConnectOptions;

use crate::Failure;

/// This process's place in the job that a launcher started it for: this one's, `mpirun`'s, `srun`'s or another's.
/// `None` when it stands alone.
pub fn of_this_process() -> Result<Option<ConnectOptions>, Failure> {
    ConnectOptions::discover().map_err(|error| Failure::Usage(error.to_string()))
}
