//! Kernels for NVIDIA's GPUs. Start reading at [`CudaBackend`]; each kernel family has its file here and its `.cu` in `kernels/`.
//!
//! Work is submitted to one stream and runs behind the host's back; only copies to the host wait. Sums have a fixed
//! order, so the same run gives the same bits again on the same kind of GPU. An index out of range, which a kernel cannot
//! report, is remembered on the device and returned by the next copy to the host.

mod attention;
mod attention_any;
mod attention_backward;
mod attention_pages;
mod beside;
mod clock;
mod compile;
mod cudnn;
mod cudnn_attention;
mod driver;
mod elementwise;
mod few_rows;
mod gemm;
mod graph;
mod grouped;
mod image;
mod integers;
mod layout;
mod loss;
mod memory;
mod norm;
mod one_bit;
mod optimizer;
mod packed;
mod permute;
mod reduce;
mod signs;
mod some_rows;
mod table;
mod transfer;

use std::sync::Mutex;

use cudarc::driver::result as cu;

use ferrospeed_tensor::backend::*;
use ferrospeed_tensor::memory::MemoryUsage;
use ferrospeed_tensor::{Category, DType, Out, Result, Tensor, TensorError};

use compile::{Kernel, Kernels, Source};
use driver::{Checked, Driver};
use memory::DevicePool;

pub use driver::device_count;

/// The GPU with this number among the visible ones, beside a device of the host.
///
/// ```no_run
/// # fn main() -> ferrospeed_tensor::Result<()> {
/// let host = ferrospeed_cpu::device();
/// let device = ferrospeed_cuda::device(0, &host)?;
/// assert_eq!(device.host(), &host);
/// # Ok(())
/// # }
/// ```
pub fn device(ordinal: usize, host: &Device) -> Result<Device> {
    Ok(Device::new(CudaBackend::open(ordinal, host)?))
}

/// Threads per block where a kernel does not care.
const BLOCK: u32 = 256;

/// Perceptrons keep rows up to this width after the activation too, which saves a third of the writes of GELU's backward.
/// Models with wider ones fill a GPU with what they must keep.
pub const KEPT_ACTIVATION_WIDTH: usize = 3072;

/// Kernels and memory of one NVIDIA GPU.
pub struct CudaBackend {
    // Fields are dropped in this order: the driver last.
    products: gemm::CublasLt,
    attention: Mutex<cudnn_attention::Plans>,
    graphs: graph::Graphs,
    kernels: Kernels,
    transfers: transfer::Transfers,
    beside: beside::Streams,
    pool: DevicePool,
    /// A [`Fault`] on the device.
    fault: u64,
    /// Zeros on the device, which kernels leave as zeros: see [`attention_pages`].
    arrivals: u64,
    driver: Driver,
    /// Whose memory and threads copies go through.
    host: Device,
}

/// A mark of the driver's.
fn marked(event: u64) -> Mark {
    // SAFETY: the driver has recorded the event, and it is destroyed with the mark.
    unsafe { Mark::new(event) }
}

/// What a kernel leaves when it met an index out of range. Matches `Fault` in `kernels/common.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Fault {
    position: u64,
    index: i64,
    limit: u64,
    op: u64,
}

/// Operations that check indices, by the number that a [`Fault`] carries.
const CHECKED_OPS: [&str; 7] =
    ["", "embedding", "cross_entropy", "index_select", "gather", "index_add", "sort_groups"];

/// The number of a checked operation.
fn op_number(name: &'static str) -> u64 {
    CHECKED_OPS.iter().position(|&known| known == name).map_or(1, |number| number as u64)
}

/// Submits a kernel: `launch!(backend, kernel, grid, block, shared bytes, arguments…)`. Arguments must have exactly the
/// types that the kernel declares; addresses are `u64`. `launch!(overlapping backend, …)`, and `launch!(@ condition, backend, …)`
/// where a condition holds, submits a kernel that may be placed before the one in front has ended.
macro_rules! launch {
    (overlapping $($rest:tt)+) => { $crate::launch!(@ true, $($rest)+) };
    (@ $overlaps:expr, $backend:expr, $kernel:expr, $grid:expr, $block:expr, $shared:expr, $($argument:expr),+ $(,)?) => {{
        let backend: &$crate::CudaBackend = $backend;
        backend.driver.bind()?;
        let function = backend.kernels.get(&backend.driver, $kernel)?;
        // SAFETY: each call lists the arguments of the kernel it names, in order and of its types, and tensors that hold
        // what the kernel reads and writes; the ops above have checked their shapes.
        unsafe {
            backend.driver.launch(
                function, $grid, $block, $shared, $overlaps,
                &mut [$(std::ptr::from_ref(&$argument).cast_mut().cast::<std::ffi::c_void>()),+],
            )
        }
    }};
    ($($rest:tt)+) => { $crate::launch!(@ false, $($rest)+) };
}
pub(crate) use launch;

/// A tensor's address as kernels take it.
fn at(tensor: &Tensor) -> u64 {
    tensor.address().as_ptr() as u64
}

/// The same of a place for a result.
fn at_out(out: &Out<'_>) -> u64 {
    out.address().as_ptr() as u64
}

/// Where a product goes, as kernels take matrices.
fn written<'a>(target: &MatrixOut<'a>) -> Matrix<'a> {
    let MatrixOut { out, offset, row_stride, batch_stride } = target;
    let (offset, row_stride, batch_stride) = (*offset, *row_stride, *batch_stride);
    Matrix { tensor: out.on_device(), offset, row_stride, batch_stride, transposed: false }
}

/// The same, zero where there is none.
fn at_option(tensor: Option<&Tensor>) -> u64 {
    tensor.map_or(0, at)
}

/// `REAL=` for a float type.
fn real(op: &'static str, dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("REAL=float"),
        DType::BF16 => Ok("REAL=bf16"),
        DType::F16 => Ok("REAL=f16"),
        dtype => Err(TensorError::BadDType { op, what: "the operand", dtype, expected: "a float type" }),
    }
}

/// `INDEX=` for an integer type.
fn index_type(op: &'static str, dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::I64 => Ok("INDEX=i64"),
        DType::I32 => Ok("INDEX=int"),
        DType::U8 => Ok("INDEX=u8"),
        dtype => Err(TensorError::BadDType { op, what: "the indices", dtype, expected: "an integer type" }),
    }
}

impl CudaBackend {
    /// Opens the GPU with this number among the visible ones, beside a device of the host.
    pub fn open(ordinal: usize, host: &Device) -> Result<CudaBackend> {
        let driver = Driver::open(ordinal)?;
        let pool = DevicePool::new(&driver)?;
        let zeros = |bytes: usize| {
            // SAFETY: a plain allocation, zeroed at once; given back when the backend is dropped.
            unsafe {
                cu::malloc_sync(bytes).and_then(|zeros| cu::memset_d8_sync(zeros, 0, bytes).map(|()| zeros))
            }
            .during("open a CUDA device")
        };
        let (fault, arrivals) =
            (zeros(size_of::<Fault>())?, zeros(attention_pages::ARRIVALS * size_of::<u32>())?);
        let products = gemm::CublasLt::new()?;
        let attention = Mutex::new(cudnn_attention::Plans::open(&driver));
        let graphs = graph::Graphs::new();
        let (kernels, transfers) = (Kernels::new(), transfer::Transfers::new(host));
        let beside = beside::Streams::default();
        Ok(CudaBackend {
            products,
            attention,
            graphs,
            kernels,
            transfers,
            beside,
            pool,
            fault,
            arrivals,
            driver,
            host: host.clone(),
        })
    }

    /// A grid of [`BLOCK`] threads each for `count` elements, eight to a thread, bounded by what the GPU runs at once.
    fn grid(&self, count: usize) -> [u32; 3] {
        let wanted = count.div_ceil(8 * BLOCK as usize).max(1);
        [wanted.min(self.driver.multiprocessors as usize * 16) as u32, 1, 1]
    }

    /// The same, one element to a thread.
    fn grid_single(&self, count: usize) -> [u32; 3] {
        let wanted = count.div_ceil(BLOCK as usize).max(1);
        [wanted.min(self.driver.multiprocessors as usize * 32) as u32, 1, 1]
    }

    fn copy_bytes(&self, source: u64, target: u64, bytes: usize) -> Result<()> {
        self.driver.bind()?;
        if bytes == 0 || source == target {
            return Ok(());
        }
        // SAFETY: both ranges are tensors of this device with so many bytes.
        unsafe { cu::memcpy_dtod_async(target, source, bytes, self.driver.stream()) }
            .during("copy on the device")
    }

    fn zero_bytes(&self, target: u64, bytes: usize) -> Result<()> {
        self.fill_bytes(target, 0, bytes)
    }

    fn fill_bytes(&self, target: u64, byte: u8, bytes: usize) -> Result<()> {
        self.driver.bind()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range is a tensor of this device with so many bytes.
        unsafe { cu::memset_d8_async(target, byte, bytes, self.driver.stream()) }.during("clear memory")
    }

    /// Device memory that lives until it is dropped, for intermediate results of one call.
    fn scratch(&self, bytes: usize) -> Result<Scratch<'_>> {
        let block = self.pool.allocate(&self.driver, bytes, Category::Buffers)?;
        Ok(Scratch { backend: self, block })
    }

    /// Writes to device memory of at least as many bytes, after everything submitted before.
    fn write(&self, source: &[u8], target: u64) -> Result<()> {
        self.graphs.expect_not_recording()?;
        self.transfers.write(&self.driver, source, target)
    }

    /// Reads from the device, after everything submitted before, and reports an index that was out of range.
    fn read(&self, source: u64, target: &mut [u8]) -> Result<()> {
        self.graphs.expect_not_recording()?;
        let mut fault = Fault::default();
        let aside = (self.fault, bytemuck::bytes_of_mut(&mut fault));
        self.transfers.read(&self.driver, source, target, aside)?;
        self.report(fault)
    }

    /// Begins to read a little from the device. What is returned waits for what was submitted before, and reports as `read` does.
    fn begin_read(&self, source: u64, bytes: usize) -> Result<impl FnOnce() -> Result<Vec<u8>> + '_> {
        self.graphs.expect_not_recording()?;
        let reading =
            self.transfers.begin_read(&self.driver, source, bytes, (self.fault, size_of::<Fault>()))?;
        Ok(move || {
            let (mut values, mut fault) = (vec![0; bytes], Fault::default());
            reading.finish(&mut values, bytemuck::bytes_of_mut(&mut fault))?;
            self.report(fault)?;
            Ok(values)
        })
    }

    /// The error that a kernel has left, once.
    fn report(&self, fault: Fault) -> Result<()> {
        if fault.op == 0 {
            return Ok(());
        }
        self.zero_bytes(self.fault, size_of::<Fault>())?;
        let op =
            usize::try_from(fault.op).ok().and_then(|op| CHECKED_OPS.get(op)).copied().unwrap_or("a kernel");
        Err(TensorError::IndexOutOfRange {
            op,
            index: fault.index,
            position: fault.position as usize,
            limit: fault.limit as usize,
        })
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        self.graphs.clear(&self.driver, &self.pool);
        self.pool.release_small(&self.driver);
        self.transfers.close();
        self.beside.close();
        if self.driver.synchronize().is_ok() {
            // SAFETY: they were allocated when the device was opened, and no kernel is left that could use them. What
            // fails here fails because the process is ending.
            unsafe {
                let _ = cu::free_sync(self.fault);
                let _ = cu::free_sync(self.arrivals);
                let _ = cu::free_sync(self.products.workspace());
            }
        }
    }
}

/// Memory for one call.
struct Scratch<'a> {
    backend: &'a CudaBackend,
    block: RawBlock,
}

impl Scratch<'_> {
    fn address(&self) -> u64 {
        self.block.address.as_ptr() as u64
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.backend.pool.free(&self.backend.driver, self.block, Category::Buffers);
    }
}

impl Memory for CudaBackend {
    fn name(&self) -> String {
        format!("cuda ({})", self.driver.name)
    }
    fn kernels(&self) -> String {
        self.name()
    }
    fn host(&self) -> Option<&Device> {
        Some(&self.host)
    }
    fn allocate(&self, bytes: usize, category: Category) -> Result<RawBlock> {
        self.pool.allocate(&self.driver, bytes, category)
    }
    fn free(&self, block: RawBlock, category: Category) {
        self.pool.free(&self.driver, block, category);
    }
    fn count_external(&self, bytes: usize, category: Category) {
        self.pool.count_external(bytes, category);
    }
    fn uncount_external(&self, bytes: usize, category: Category) {
        self.pool.uncount_external(bytes, category);
    }
    fn memory_usage(&self) -> MemoryUsage {
        self.pool.usage()
    }
    fn reset_peak_memory(&self) {
        self.pool.reset_peak();
    }
}

impl Work for CudaBackend {
    fn synchronize(&self) -> Result<()> {
        self.read(0, &mut [])
    }
    fn mark(&self) -> Result<Option<Mark>> {
        self.driver.mark().map(|mark| Some(marked(mark)))
    }
    fn seconds_between(&self, earlier: &Mark, later: &Mark) -> Result<f64> {
        self.driver.seconds_between(earlier.number(), later.number())
    }
    fn unmark(&self, mark: Mark) {
        self.driver.unmark(mark.number());
    }
    fn wait_for(&self, mark: &Mark) -> Result<()> {
        self.driver.wait_for(mark.number())
    }
    fn follow(&self, mark: &Mark) -> Result<()> {
        self.driver.follow(mark.number())
    }
    fn stream(&self) -> Option<(usize, u64)> {
        Some((self.driver.ordinal, self.driver.stream() as u64))
    }
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<u64>> {
        graph::record(self, work)
    }
    fn replay(&self, recorded: u64) -> Result<()> {
        graph::replay(self, recorded)
    }
    fn forget(&self, recorded: u64) {
        graph::forget(self, recorded);
    }
}

impl Copies for CudaBackend {
    fn locked(&self, numel: usize, dtype: DType, category: Category) -> Result<Option<Tensor>> {
        self.locked_tensor(numel, dtype, category).map(Some)
    }
    fn copy_beside(&self, source: &Tensor, target: Out<'_>, after: &Mark) -> Result<Mark> {
        self.begin_beside(source, &target, after)
    }
    fn copy_from_host(&self, source: &[u8], target: Out<'_>) -> Result<()> {
        if source.len() != target.size_bytes() {
            let what = format!("{} bytes do not fill {target:?}", source.len());
            return Err(TensorError::argument("copy_from_host", what));
        }
        self.write(source, at_out(&target))
    }
    fn copy_to_host(&self, source: &Tensor, target: &mut [u8]) -> Result<()> {
        if target.len() != source.size_bytes() {
            let what = format!("{source:?} does not fill {} bytes", target.len());
            return Err(TensorError::argument("copy_to_host", what));
        }
        self.read(at(source), target)
    }
    fn read_later<'a>(&'a self, source: &Tensor) -> Result<ReadLater<'a>> {
        Ok(Box::new(self.begin_read(at(source), source.size_bytes())?))
    }
    fn copy(&self, source: &Tensor, target: Out<'_>) -> Result<()> {
        if source.dtype() != target.dtype() || source.numel() != target.numel() {
            return Err(TensorError::ShapeMismatch {
                op: "copy",
                left: *source.shape(),
                right: *target.shape(),
            });
        }
        self.copy_bytes(at(source), at_out(&target), source.size_bytes())
    }
    fn fill(&self, target: Out<'_>, value: f32) -> Result<()> {
        layout::fill(self, target.into_tensor(), value)
    }
    fn cast(&self, source: &Tensor, target: Out<'_>) -> Result<()> {
        layout::cast(self, source, target.into_tensor())
    }
}

#[cfg(test)]
extern crate self as ferrospeed_cuda;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
