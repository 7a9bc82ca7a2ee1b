//! The driver: one GPU, its context and the stream that all work goes to.
//!
//! CUDA's libraries are opened when a device is asked for, never before, so the same binary runs where there is none.
//! What is missing or too old is an error with the library's name and what to install. Everything is submitted to one
//! stream: work runs in the order it was submitted, and memory that is freed can be given to the next op at once.

use std::cell::Cell;
use std::ffi::c_void;

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use ferrospeed_tensor::{Result, TensorError};

/// The oldest generation whose instructions the kernels use: bf16 conversions came with Ampere.
const MIN_CAPABILITY: (i32, i32) = (8, 0);
/// The first generation whose kernels may start before the one in front has ended.
const OVERLAP_CAPABILITY: (i32, i32) = (9, 0);

/// A kernel that wants more shared memory than this beside what it has of its own (at most 17 KiB) must ask for it.
const UNASKED_SHARED_BYTES: u32 = (48 - 17) << 10;

/// A failed call of a CUDA library.
pub(crate) fn failed(op: &'static str, what: impl std::fmt::Display) -> TensorError {
    TensorError::Device { op, device: "cuda".into(), what: what.to_string() }
}

/// The driver's own words for an error.
fn driver_error(op: &'static str, error: cu::DriverError) -> TensorError {
    let text = |words: Result<&std::ffi::CStr, cu::DriverError>| {
        words.map_or_else(|_| String::new(), |words| words.to_string_lossy().into_owned())
    };
    failed(op, format!("{} ({})", text(error.error_string()), text(error.error_name())))
}

/// Turns the driver's results into ours.
pub(crate) trait Checked<T> {
    /// Names the operation that failed.
    fn during(self, op: &'static str) -> Result<T>;
}

impl<T> Checked<T> for Result<T, cu::DriverError> {
    fn during(self, op: &'static str) -> Result<T> {
        self.map_err(|error| driver_error(op, error))
    }
}

/// A library that is opened at run time.
struct Library {
    file: &'static str,
    found: fn() -> bool,
    brought_by: &'static str,
}

/// The libraries without which nothing runs. cuDNN is not among them: attention has kernels of its own.
const REQUIRED: [Library; 3] = [
    Library {
        file: "libcuda.so.1",
        // SAFETY: opening the driver's library runs its initialisers and nothing else.
        found: || unsafe { sys::is_culib_present() },
        brought_by: "the NVIDIA driver",
    },
    Library {
        file: "libnvrtc.so",
        // SAFETY: as above, for the run-time compiler.
        found: || unsafe { cudarc::nvrtc::sys::is_culib_present() },
        brought_by: "CUDA's run-time compiler (package cuda-nvrtc)",
    },
    Library {
        file: "libcublasLt.so",
        // SAFETY: as above, for cuBLASLt.
        found: || unsafe { cudarc::cublaslt::sys::is_culib_present() },
        brought_by: "cuBLAS (package libcublas)",
    },
];

/// Why CUDA cannot be used here, or `None`.
pub(crate) fn missing_library() -> Option<String> {
    let library = REQUIRED.iter().find(|library| !(library.found)())?;
    Some(format!(
        "{} was not found: install {}, or add its folder to LD_LIBRARY_PATH (now {:?})",
        library.file,
        library.brought_by,
        std::env::var("LD_LIBRARY_PATH").unwrap_or_default(),
    ))
}

/// How many GPUs this process sees; 0 without a driver.
pub fn device_count() -> usize {
    if missing_library().is_some() || cu::init().is_err() {
        return 0;
    }
    cu::device::get_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

thread_local! {
    /// The context this thread works in: setting it anew on every call would cost more than the call.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// One GPU.
pub(crate) struct Driver {
    /// Its number among the visible ones.
    pub(crate) ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Its name, for messages.
    pub(crate) name: String,
    /// Its generation, such as (9, 0).
    pub(crate) capability: (i32, i32),
    /// How many blocks run side by side at least.
    pub(crate) multiprocessors: u32,
    /// The most shared memory that a block may ask for.
    pub(crate) shared_bytes: usize,
}

// SAFETY: contexts and streams may be used from any thread that has made the context current, which `bind` does.
unsafe impl Send for Driver {}
// SAFETY: as above; the driver's calls are thread-safe.
unsafe impl Sync for Driver {}

impl Driver {
    /// Opens a GPU by its number among those that are visible.
    pub(crate) fn open(ordinal: usize) -> Result<Driver> {
        const OP: &str = "open a CUDA device";
        if let Some(why) = missing_library() {
            return Err(failed(OP, why));
        }
        cu::init().during(OP)?;
        let count = cu::device::get_count().during(OP)?;
        let Some(wanted) = i32::try_from(ordinal).ok().filter(|&wanted| wanted < count) else {
            return Err(failed(OP, format!("there is no device {ordinal}: {count} are visible")));
        };
        let device = cu::device::get(wanted).during(OP)?;
        use sys::CUdevice_attribute_enum as Attribute;
        // SAFETY: the device was just found.
        let attribute = |which| unsafe { cu::device::get_attribute(device, which) }.during(OP);
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let name = cu::device::get_name(device).during(OP)?;
        if capability < MIN_CAPABILITY {
            let why = format!(
                "{name} has compute capability {}.{}; {}.{} or newer is needed",
                capability.0, capability.1, MIN_CAPABILITY.0, MIN_CAPABILITY.1
            );
            return Err(failed(OP, why));
        }
        let multiprocessors =
            u32::try_from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?).unwrap_or(1);
        let shared_bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared_bytes = usize::try_from(shared_bytes).unwrap_or(0);
        // SAFETY: the device exists; the context is released when this object is dropped.
        let context = unsafe { cu::primary_ctx::retain(device) }.during(OP)?;
        // SAFETY: the context was just retained.
        unsafe { cu::ctx::set_current(context) }.during(OP)?;
        CURRENT.set(context as usize);
        let stream = cu::stream::create(cu::stream::StreamKind::NonBlocking).during(OP)?;
        Ok(Driver { ordinal, device, context, stream, name, capability, multiprocessors, shared_bytes })
    }

    /// Makes the context current on this thread.
    pub(crate) fn bind(&self) -> Result<()> {
        if CURRENT.get() != self.context as usize {
            // SAFETY: the context lives as long as this object.
            unsafe { cu::ctx::set_current(self.context) }.during("select a CUDA device")?;
            CURRENT.set(self.context as usize);
        }
        Ok(())
    }

    pub(crate) fn context(&self) -> sys::CUcontext {
        self.context
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits for everything submitted so far. Errors of kernels come to light here.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream is ours.
        unsafe { cu::stream::synchronize(self.stream) }.during("wait for the device")
    }

    /// Submits a kernel. With `overlaps`, where the device can, it is placed while the one before still runs, and waits
    /// inside: see `wait_for_earlier` in the kernels.
    ///
    /// # Safety
    /// `arguments` point to values of the types the kernel declares, and device addresses among them are valid for what
    /// the kernel does there.
    pub(crate) unsafe fn launch(
        &self,
        function: sys::CUfunction,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        overlaps: bool,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        use sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION as EARLY;
        let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        let mut early = sys::CUlaunchAttribute { id: EARLY, pad: [0; 4], value };
        let overlaps = overlaps && self.capability >= OVERLAP_CAPABILITY;
        let [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]] = [grid, block];
        let launch = sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block_x,
            blockDimY: block_y,
            blockDimZ: block_z,
            sharedMemBytes: shared_bytes,
            hStream: self.stream,
            attrs: &mut early,
            numAttrs: u32::from(overlaps),
        };
        if shared_bytes > UNASKED_SHARED_BYTES {
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
            // SAFETY: the function is a loaded kernel.
            unsafe { sys::cuFuncSetAttribute(function, SHARED, shared_bytes as i32) }
                .result()
                .during("ask for shared memory")?;
        }
        // SAFETY: the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&launch, function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .during("launch a kernel")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: stream and context are ours, and no tensor is left that could use them. What fails here fails
            // because the process is ending.
            unsafe {
                let _ = cu::stream::synchronize(self.stream);
                let _ = cu::stream::destroy(self.stream);
                let _ = cu::primary_ctx::release(self.device);
            }
            CURRENT.set(0);
        }
    }
}
