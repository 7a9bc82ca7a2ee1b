//! Copies beside the stream of all work: a stream each way, between device memory and page-locked memory of the host.
//! See [`ferrospeed_tensor::beside`].

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use ferrospeed_tensor::backend::Mark;
use ferrospeed_tensor::{Category, DType, Out, Result, Tensor, TensorError};

use crate::driver::{Checked, Driver};
use crate::{CudaBackend, at, at_out, marked};

const OP: &str = "copy beside other work";

/// The streams, opened with the first copy.
#[derive(Default)]
pub(crate) struct Streams {
    opened: OnceLock<[Stream; 2]>,
}

#[derive(Clone, Copy)]
struct Stream(sys::CUstream);

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Streams {
    /// The stream of one way: out of the device, or into it.
    fn stream(&self, is_out: bool) -> Result<sys::CUstream> {
        let open = || cu::stream::create(cu::stream::StreamKind::NonBlocking).during(OP).map(Stream);
        let streams = match self.opened.get() {
            Some(streams) => streams,
            None => {
                let made = [open()?, open()?];
                if self.opened.set(made).is_err() {
                    made.into_iter().for_each(close);
                }
                self.opened.get().expect("one thread or another has set it")
            }
        };
        Ok(streams[usize::from(is_out)].0)
    }

    /// Ends them. Nobody may be copying.
    pub(crate) fn close(&self) {
        self.opened.get().into_iter().flatten().copied().for_each(close);
    }
}

fn close(stream: Stream) {
    // SAFETY: the stream is ours, and nobody uses it any more. What fails here fails because the process is ending.
    unsafe {
        let _ = cu::stream::synchronize(stream.0);
        let _ = cu::stream::destroy(stream.0);
    }
}

/// Page-locked memory. The driver gives it back with the context where that ends first.
struct Locked {
    memory: NonNull<u8>,
    context: sys::CUcontext,
}

// SAFETY: plain memory of the process.
unsafe impl Send for Locked {}
// SAFETY: as above; the tensors over it say who may write.
unsafe impl Sync for Locked {}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: allocated under this context, and no tensor over it is left. The thread goes on with the context it had; one
        // that has ended has taken the memory with it.
        unsafe {
            if sys::cuCtxPushCurrent_v2(self.context).result().is_ok() {
                let _ = cu::free_host(self.memory.as_ptr().cast());
                let _ = sys::cuCtxPopCurrent_v2(&mut std::ptr::null_mut());
            }
        }
    }
}

impl CudaBackend {
    pub(super) fn locked_tensor(&self, numel: usize, dtype: DType, category: Category) -> Result<Tensor> {
        self.driver.bind()?;
        let bytes = (numel * dtype.size_bytes()).max(1);
        // SAFETY: a plain allocation, given back by `Locked`.
        let memory = unsafe { cu::malloc_host(bytes, 0) }.during("page-lock memory of the host")?;
        let memory = NonNull::new(memory.cast()).expect("the driver gives no address zero");
        let owner = Arc::new(Locked { memory, context: self.driver.context() });
        // SAFETY: so many bytes, aligned to a page, which live as long as their owner; nobody else knows them.
        Ok(unsafe { Tensor::from_external(memory, [numel], dtype, &self.host, category, owner) })
    }

    pub(super) fn begin_beside(&self, source: &Tensor, target: &Out<'_>, after: &Mark) -> Result<Mark> {
        let is_out = !source.device().backend().is_host();
        if is_out != target.device().backend().is_host() {
            let what = format!("{source:?} and {target:?}: one must be the host's and one the device's");
            return Err(TensorError::argument("copy_beside", what));
        }
        let bytes = source.size_bytes();
        let driver: &Driver = &self.driver;
        driver.bind()?;
        let stream = self.beside.stream(is_out)?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event was recorded and lives; both tensors have so many bytes, live until the returned event was waited
        // for, and are page-locked memory and device memory.
        unsafe {
            cu::stream::wait_event(stream, after.number() as sys::CUevent, flags).during(OP)?;
            if is_out {
                let target = std::slice::from_raw_parts_mut(target.address().as_ptr(), bytes);
                cu::memcpy_dtoh_async(target, at(source), stream).during(OP)?;
            } else {
                let source = std::slice::from_raw_parts(source.address().as_ptr(), bytes);
                cu::memcpy_htod_async(at_out(target), source, stream).during(OP)?;
            }
        }
        driver.mark_in(stream).map(marked)
    }
}
