//! NCCL: operations on the memory of GPUs, one rank per GPU.
//!
//! The host's carrier goes first: through it the ranks agree on the operation, so that one that is missing, dead or in
//! another operation is named as it is without GPUs. Only then NCCL gets the work, on a stream of its own behind what the
//! device was doing, and it is waited for with the same deadline; a communicator that does not finish is aborted.
//!
//! Reductions are NCCL's own: the same bits on every rank, and again on the same machines, but not the fold in rank order
//! of the other backends. Messages between two ranks pass through the host.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{result as cu, sys as cuda};
use cudarc::nccl::{result as nccl, sys};

use crate::backend::{Carrier, Membership, Message, Ticket};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::op::{Collective, Kind, Part};
use crate::region::Region;

/// Where a device's work is submitted: operations on its memory come behind that work.
#[derive(Debug, Clone, Copy)]
pub struct DeviceStream {
    /// The GPU's number among those that are visible.
    pub ordinal: usize,
    /// The CUDA stream's handle.
    pub handle: u64,
}

/// What tells one GPU from all others, everywhere.
pub(crate) type DeviceIdentity = [u8; 16];

/// The name that begins a communicator.
pub(crate) const ID_BYTES: usize = 128;

fn failed(problem: impl Into<String>) -> Error {
    Error::Backend { backend: "nccl", problem: problem.into() }
}

/// Turns results of both libraries into ours.
trait Checked<T> {
    fn during(self, what: &str) -> Result<T>;
}

impl<T> Checked<T> for std::result::Result<T, cu::DriverError> {
    fn during(self, what: &str) -> Result<T> {
        self.map_err(|error| failed(format!("{what}: {error:?}")))
    }
}

impl<T> Checked<T> for std::result::Result<T, nccl::NcclError> {
    fn during(self, what: &str) -> Result<T> {
        self.map_err(|error| failed(format!("{what}: {:?}", error.0)))
    }
}

/// Why this rank cannot use NCCL, or the identity of its GPU.
pub(crate) fn identity(stream: DeviceStream) -> Result<DeviceIdentity> {
    // SAFETY: opening the library runs its initialisers and nothing else.
    if !unsafe { sys::is_culib_present() } {
        let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        return Err(failed(format!(
            "libnccl.so was not found: install NCCL, or add its folder to LD_LIBRARY_PATH (now {path:?})"
        )));
    }
    let uuid = cu::device::get_uuid(device(stream)?).during("ask for the GPU's identity")?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// A new communicator's name, made by one rank for all.
pub(crate) fn new_id() -> Result<[u8; ID_BYTES]> {
    Ok(nccl::get_uniqueid().during("begin a communicator")?.internal.map(|byte| byte as u8))
}

fn device(stream: DeviceStream) -> Result<cuda::CUdevice> {
    let ordinal = i32::try_from(stream.ordinal).map_err(|_| failed("there is no such GPU"))?;
    cu::device::get(ordinal).during("find the GPU")
}

/// Carries operations on the memory of the ranks' GPUs.
pub(crate) struct NcclCarrier {
    membership: Membership,
    host: Arc<dyn Carrier>,
    gpu: Gpu,
    communicator: Communicator,
}

/// This rank's GPU: its context, and a stream beside the one that computes.
struct Gpu {
    device: cuda::CUdevice,
    context: cuda::CUcontext,
    computing: cuda::CUstream,
    stream: cuda::CUstream,
    /// Passed when the work before an operation is done, and when the operation is.
    before: cuda::CUevent,
    after: cuda::CUevent,
}

struct Communicator(sys::ncclComm_t);

// SAFETY: handles of CUDA may be used from any thread that has made the context current, which `bind` does; the
// communicator is used by one thread at a time, as the carrier's contract says of collectives.
unsafe impl Send for NcclCarrier {}
// SAFETY: as above; messages touch only the host's carrier and copies, which are thread-safe.
unsafe impl Sync for NcclCarrier {}

impl Gpu {
    fn open(stream: DeviceStream) -> Result<Gpu> {
        const WHAT: &str = "open the GPU";
        let device = device(stream)?;
        // SAFETY: the device exists, and whoever computes on it has made its primary context, which is retained.
        unsafe {
            let context = cu::primary_ctx::retain(device).during(WHAT)?;
            cu::ctx::set_current(context).during(WHAT)?;
            let event = || cu::event::create(cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING).during(WHAT);
            Ok(Gpu {
                device,
                context,
                computing: stream.handle as cuda::CUstream,
                stream: cu::stream::create(cu::stream::StreamKind::NonBlocking).during(WHAT)?,
                before: event()?,
                after: event()?,
            })
        }
    }

    fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained for as long as this object lives.
        unsafe { cu::ctx::set_current(self.context) }.during("select the GPU")
    }

    /// Work submitted to our stream from now on comes behind what was submitted to the computing one.
    fn follow_computing(&self) -> Result<()> {
        let flags = cuda::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: streams and events are live.
        unsafe {
            cu::event::record(self.before, self.computing).during("order work")?;
            cu::stream::wait_event(self.stream, self.before, flags).during("order work")
        }
    }

    fn copy_from(&self, source: &Region) -> Result<Region> {
        let copy = Region::zeroed(source.len());
        self.bind()?;
        self.follow_computing()?;
        if !source.is_empty() {
            // SAFETY: nobody else knows the copy; the source is live device memory of that length.
            unsafe {
                let target = copy.as_mut_slice::<u8>();
                cu::memcpy_dtoh_async(target, source.as_ptr() as u64, self.stream)
                    .during("copy a message")?;
                cu::stream::synchronize(self.stream).during("copy a message")?;
            }
        }
        Ok(copy)
    }

    fn copy_to(&self, source: &Region, target: &Region) -> Result<()> {
        self.bind()?;
        self.follow_computing()?;
        if !source.is_empty() {
            // SAFETY: the source holds a finished message; the target is live device memory of that length.
            unsafe {
                let bytes = source.as_slice::<u8>();
                cu::memcpy_htod_async(target.as_ptr() as u64, bytes, self.stream).during("copy a message")?;
                cu::stream::synchronize(self.stream).during("copy a message")?;
            }
        }
        Ok(())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: all of it is ours and unused. What fails here fails because the process is ending.
        unsafe {
            if cu::ctx::set_current(self.context).is_ok() {
                let _ = cu::stream::destroy(self.stream);
                let _ = cu::event::destroy(self.before);
                let _ = cu::event::destroy(self.after);
                let _ = cu::primary_ctx::release(self.device);
            }
        }
    }
}

impl Communicator {
    /// Joins the others; they have until `deadline`.
    fn join(id: [u8; ID_BYTES], membership: &Membership, deadline: Instant) -> Result<Communicator> {
        const UNDEFINED: i32 = i32::MIN;
        let mut config = sys::ncclConfig_t {
            size: size_of::<sys::ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 22_403,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
        let (size, me) = (membership.size() as i32, membership.me as i32);
        let mut handle = std::ptr::null_mut();
        // SAFETY: all arguments outlive the call; the handle is waited for below before anything else uses it.
        unsafe { nccl::comm_init_rank_config(&mut handle, size, id, me, &mut config) }
            .during("join the communicator")?;
        let communicator = Communicator(handle);
        communicator.settle("join the communicator", deadline, membership)?;
        Ok(communicator)
    }

    /// Waits until a call that went on behind our back is done.
    fn settle(&self, what: &str, deadline: Instant, membership: &Membership) -> Result<()> {
        poll(deadline, membership, || {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is live, and the place for its state is ours.
            unsafe { sys::ncclCommGetAsyncError(self.0, &mut state) }.result().during(what)?;
            match state.result().during(what)? {
                nccl::NcclStatus::InProgress => Ok(false),
                _ => Ok(true),
            }
        })
        .and_then(|done| if done { Ok(()) } else { Err(failed(format!("{what}: it took too long"))) })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Whether it is idle or stuck, abort ends it without waiting for others.
        // SAFETY: nothing uses the communicator any more.
        let _ = unsafe { nccl::comm_abort(self.0) };
    }
}

/// Asks again until it is so: quickly at first, then a few thousand times a second. `false` at the deadline.
fn poll(
    deadline: Instant,
    membership: &Membership,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let started = Instant::now();
    loop {
        if is_done()? {
            return Ok(true);
        }
        membership.state.check(membership.group_id)?;
        if Instant::now() >= deadline {
            return Ok(false);
        }
        if started.elapsed() < Duration::from_micros(200) {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

fn element(dtype: DType) -> Option<sys::ncclDataType_t> {
    use sys::ncclDataType_t as N;
    Some(match dtype {
        DType::F32 => N::ncclFloat32,
        DType::F64 => N::ncclFloat64,
        DType::BF16 => N::ncclBfloat16,
        DType::F16 => N::ncclFloat16,
        DType::I8 => N::ncclInt8,
        DType::I32 => N::ncclInt32,
        DType::I64 => N::ncclInt64,
        DType::U8 => N::ncclUint8,
        // Sums of booleans are logical, and there are no 16-bit integers.
        DType::Bool | DType::I16 => return None,
    })
}

fn reduction(op: ReduceOp) -> Option<sys::ncclRedOp_t> {
    use sys::ncclRedOp_t as N;
    Some(match op {
        ReduceOp::Sum => N::ncclSum,
        ReduceOp::Avg => N::ncclAvg,
        ReduceOp::Min => N::ncclMin,
        ReduceOp::Max => N::ncclMax,
        ReduceOp::Product => N::ncclProd,
        ReduceOp::BitAnd | ReduceOp::BitOr => return None,
    })
}

fn at(region: &Region, offset: usize) -> *mut c_void {
    region.as_ptr().wrapping_add(offset).cast()
}

/// (rank, offset, bytes) of parts that lie end to end.
fn pieces(cuts: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> {
    cuts.iter().enumerate().scan(0, |offset, (rank, &bytes)| {
        let start = *offset;
        *offset += bytes;
        Some((rank, start, bytes))
    })
}

impl NcclCarrier {
    pub(crate) fn connect(
        membership: Membership,
        host: Arc<dyn Carrier>,
        stream: DeviceStream,
        id: [u8; ID_BYTES],
        deadline: Instant,
    ) -> Result<NcclCarrier> {
        let gpu = Gpu::open(stream)?;
        let communicator = Communicator::join(id, &membership, deadline)?;
        Ok(NcclCarrier { membership, host, gpu, communicator })
    }

    /// Submits one buffer's part of an operation.
    ///
    /// # Safety
    /// The part's regions are memory of this rank's GPU and live until the operation is done.
    unsafe fn submit(&self, operation: &Collective, part: &Part) -> Result<()> {
        let what = operation.kind.name();
        let (comm, stream) = (self.communicator.0, self.gpu.stream.cast());
        let (me, size) = (self.membership.me, operation.dtype.size());
        let root = operation.root.unwrap_or(0) as i32;
        let reduced = || {
            let pair = element(operation.dtype).zip(operation.reduce.and_then(reduction));
            pair.ok_or_else(|| {
                operation.invalid(format!("NCCL does not reduce {} in this way", operation.dtype))
            })
        };
        let bytes = sys::ncclDataType_t::ncclUint8;
        let is_equal = |cuts: &[usize]| cuts.windows(2).all(|pair| pair[0] == pair[1]);
        let (input, output) = (at(&part.input, 0), at(&part.output, 0));
        let count = part.input.len() / size;
        // SAFETY: the caller's promise, and lengths that `Collective::check` has checked.
        unsafe {
            match operation.kind {
                Kind::AllReduce => {
                    let (dtype, op) = reduced()?;
                    nccl::all_reduce(input, output, count, dtype, op, comm, stream).during(what)?;
                }
                Kind::Reduce => {
                    let (dtype, op) = reduced()?;
                    nccl::reduce(input, output, count, dtype, op, root, comm, stream).during(what)?;
                }
                Kind::ReduceScatter => {
                    let (dtype, op) = reduced()?;
                    if is_equal(&part.input_cuts) {
                        let own = part.output.len() / size;
                        nccl::reduce_scatter(input, output, own, dtype, op, comm, stream).during(what)?;
                    } else {
                        for (rank, offset, bytes) in pieces(&part.input_cuts) {
                            let (from, count) = (at(&part.input, offset), bytes / size);
                            let to = if rank == me { output } else { from };
                            nccl::reduce(from, to, count, dtype, op, rank as i32, comm, stream)
                                .during(what)?;
                        }
                    }
                }
                Kind::AllGather if is_equal(&part.output_cuts) => {
                    nccl::all_gather(input, output, part.input.len(), bytes, comm, stream).during(what)?;
                }
                Kind::AllGather => {
                    for (rank, offset, length) in pieces(&part.output_cuts) {
                        let to = at(&part.output, offset);
                        let from = if rank == me { input } else { to };
                        nccl::broadcast(from, to, length, bytes, rank as i32, comm, stream).during(what)?;
                    }
                }
                Kind::Broadcast => {
                    nccl::broadcast(input, output, part.input.len(), bytes, root, comm, stream)
                        .during(what)?;
                }
                Kind::Scatter | Kind::Gather | Kind::AllToAll => self.exchange(operation, part)?,
                Kind::Barrier | Kind::Send | Kind::Recv => {}
            }
        }
        Ok(())
    }

    /// Operations in which each pair of ranks has bytes of its own.
    ///
    /// # Safety
    /// As for [`NcclCarrier::submit`].
    unsafe fn exchange(&self, operation: &Collective, part: &Part) -> Result<()> {
        let what = operation.kind.name();
        let (comm, stream) = (self.communicator.0, self.gpu.stream.cast());
        let bytes = sys::ncclDataType_t::ncclUint8;
        let whole_to_root = [part.input.len()];
        let whole_from_root = [part.output.len()];
        let root = operation.root.unwrap_or(0);
        let (sent, received): (Vec<_>, Vec<_>) = match operation.kind {
            Kind::Gather => (
                pieces(&whole_to_root).map(|(_, o, b)| (root, o, b)).collect(),
                pieces(&part.output_cuts).collect(),
            ),
            Kind::Scatter => (
                pieces(&part.input_cuts).collect(),
                pieces(&whole_from_root).map(|(_, o, b)| (root, o, b)).collect(),
            ),
            _ => (pieces(&part.input_cuts).collect(), pieces(&part.output_cuts).collect()),
        };
        // SAFETY: the caller's promise; offsets and lengths add up to the regions'.
        unsafe {
            for (rank, offset, length) in sent {
                nccl::send(at(&part.input, offset), length, bytes, rank as i32, comm, stream).during(what)?;
            }
            for (rank, offset, length) in received {
                nccl::recv(at(&part.output, offset), length, bytes, rank as i32, comm, stream)
                    .during(what)?;
            }
        }
        Ok(())
    }

    /// Submits all parts as one, and waits.
    fn run_on_device(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        let what = operation.kind.name();
        self.gpu.bind()?;
        self.gpu.follow_computing()?;
        nccl::group_start().during(what)?;
        // SAFETY: the group's callers give memory of this GPU, and keep it until the operation is done.
        let submitted = operation.parts.iter().try_for_each(|part| unsafe { self.submit(operation, part) });
        nccl::group_end().during(what)?;
        submitted?;
        self.communicator.settle(what, ticket.deadline, &self.membership)?;
        // SAFETY: event and stream are live.
        unsafe { cu::event::record(self.gpu.after, self.gpu.stream) }.during(what)?;
        let finished = poll(ticket.deadline, &self.membership, || {
            // SAFETY: as above.
            match unsafe { cu::event::query(self.gpu.after) } {
                Ok(()) => Ok(true),
                Err(error) if error.0 == cuda::CUresult::CUDA_ERROR_NOT_READY => {
                    let mut state = sys::ncclResult_t::ncclSuccess;
                    // SAFETY: the communicator is live, and the place for its state is ours.
                    unsafe { sys::ncclCommGetAsyncError(self.communicator.0, &mut state) }
                        .result()
                        .during(what)?;
                    state.result().during(what)?;
                    Ok(false)
                }
                Err(error) => Err(error).during(what),
            }
        })?;
        if finished {
            Ok(())
        } else {
            Err(ticket.deadline_error(vec!["every rank entered; NCCL did not finish".into()]))
        }
    }
}

impl Carrier for NcclCarrier {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn max_parts(&self) -> usize {
        256
    }

    fn run(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        let agreement =
            Collective { kind: Kind::Barrier, reduce: None, root: None, parts: Vec::new(), ..*operation };
        self.host.run(&agreement, ticket)?;
        if operation.kind == Kind::Barrier {
            return Ok(());
        }
        self.run_on_device(operation, ticket)
    }

    fn send(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        let region = self.gpu.copy_from(&message.region)?;
        self.host.send(&Message { region, ..message.clone() }, ticket)
    }

    fn recv(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        let region = Region::zeroed(message.region.len());
        self.host.recv(&Message { region: region.clone(), ..message.clone() }, ticket)?;
        self.gpu.copy_to(&region, &message.region)
    }
}
