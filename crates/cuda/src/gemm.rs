//! Matrix products by cuBLASLt, with the bias in the epilogue, and a cache of what was chosen of its heuristic's offers.
//!
//! Our matrices are row-major, cuBLASLt's column-major: `C = A·B` is computed as `Cᵀ = Bᵀ·Aᵀ`, which costs nothing. The
//! choice follows a rule, never a clock: timing would make bits depend on the machine's mood. Activations and sums of
//! columns (bias gradients) are passes of their own: the library's epilogues for them slow a product down by more.

mod few;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::cublaslt::{result as lt, sys};
use ferrospeed_tensor::backend::{Gemm, Matrix, Products, Unary};
use ferrospeed_tensor::{DType, Result, TensorError};
use few::by_own_kernel;

use crate::driver::failed;
use crate::{CudaBackend, at_option, few_rows, written};

pub(super) use few::{FEW_ROWS, JOINED_ROWS, SHARED, gemms};

const OP: &str = "matrix product";
/// What Hopper's kernels want for splitting sums.
const WORKSPACE_BYTES: usize = 64 << 20;
/// A kernel that asks for no more than this wants a counter, from which its blocks draw their tiles and which is cleared
/// before every product. Without it they take them in a fixed order, to the same bits, and nothing has to be cleared: a step
/// is 0.2 to 0.4 % faster. A kernel that insists gets all.
const COUNTER_BYTES: usize = 16;

/// All that decides which kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 4],
    types: [DType; 2],
    strides: [[usize; 2]; 3],
    transposed: [bool; 2],
    alignment: [usize; 3],
    has_bias: bool,
    accumulate: bool,
}

/// A product that is ready to run.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
}

/// cuBLASLt on one device.
pub(crate) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    /// `None` where the library has no kernel.
    plans: Mutex<HashMap<Key, Option<Plan>>>,
}

// SAFETY: the handle may be used from any thread; plans are only used under the lock.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    pub(crate) fn new() -> Result<CublasLt> {
        let handle = lt::create_handle().map_err(|error| failed("open cuBLASLt", format!("{error:?}")))?;
        // SAFETY: a plain allocation; the backend gives it back.
        let workspace = unsafe { cudarc::driver::result::malloc_sync(WORKSPACE_BYTES) }
            .map_err(|error| failed("open cuBLASLt", format!("{error:?}")))?;
        Ok(CublasLt { handle, workspace, plans: Mutex::default() })
    }

    /// The address of the memory that products may use.
    pub(crate) fn workspace(&self) -> u64 {
        self.workspace
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        dtype => Err(TensorError::BadDType { op: OP, what: "an operand", dtype, expected: "a float type" }),
    }
}

fn address(matrix: &Matrix<'_>) -> u64 {
    matrix.tensor.address().as_ptr() as u64 + (matrix.offset * matrix.tensor.dtype().size_bytes()) as u64
}

/// The largest power of two up to 256 that divides an address.
fn alignment(address: u64) -> usize {
    1 << address.trailing_zeros().min(8)
}

pub(crate) fn product(backend: &CudaBackend, gemm: &Gemm<'_>) -> Result<()> {
    if gemm.m == 0 || gemm.n == 0 || gemm.batch == 0 {
        return Ok(());
    }
    backend.driver.bind()?;
    if by_own_kernel(backend, gemm)? {
        return Ok(());
    }
    let target = match (gemm.activation, &gemm.before_activation) {
        (Some(_), Some(before)) => Matrix { tensor: before.on_device(), ..written(&gemm.c) },
        _ => written(&gemm.c),
    };
    if gemm.k == 0 {
        return Err(TensorError::argument(OP, "a product over nothing"));
    }
    run(backend, gemm, &target)?;
    if let Some(activation) = gemm.activation {
        backend.unary_into(Unary::Activation(activation), target.tensor, gemm.c.out.on_device())?;
    }
    Ok(())
}

/// Runs a product into `c`, without its activation.
fn run(backend: &CudaBackend, gemm: &Gemm<'_>, c: &Matrix<'_>) -> Result<()> {
    let addresses = [address(&gemm.a), address(&gemm.b), address(c)];
    let key = Key {
        sizes: [gemm.m, gemm.n, gemm.k, gemm.batch],
        types: [gemm.a.tensor.dtype(), c.tensor.dtype()],
        strides: [gemm.a, gemm.b, *c].map(|matrix| [matrix.row_stride, matrix.batch_stride]),
        transposed: [gemm.a.transposed, gemm.b.transposed],
        alignment: addresses.map(alignment),
        has_bias: gemm.bias.is_some(),
        accumulate: gemm.accumulate,
    };
    let products = &backend.products;
    let mut plans = products.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(plan) = plans.entry(key).or_insert_with(|| Plan::new(products.handle, &key).ok()) else {
        return Err(failed(OP, format!("cuBLASLt has no kernel for {gemm:?}")));
    };
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    if gemm.bias.is_some() {
        plan.describe(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at_option(gemm.bias))?;
    }
    let (alpha, beta) = (gemm.alpha, if gemm.accumulate { 1.0f32 } else { 0.0 });
    let scalar = |value: &f32| std::ptr::from_ref(value).cast::<c_void>();
    let multiply = |plan: &Plan| {
        // SAFETY: the plan was made for these sizes and alignments; the addresses are tensors of this device that hold them.
        unsafe {
            lt::matmul(
                products.handle,
                plan.description,
                scalar(&alpha),
                scalar(&beta),
                addresses[1] as *const c_void,
                plan.layouts[1],
                addresses[0] as *const c_void,
                plan.layouts[0],
                addresses[2] as *const c_void,
                plan.layouts[2],
                addresses[2] as *mut c_void,
                plan.layouts[2],
                &plan.algorithm,
                products.workspace as *mut c_void,
                plan.workspace_bytes,
                backend.driver.stream().cast(),
            )
        }
    };
    let mut outcome = multiply(plan);
    if outcome.is_err() && plan.workspace_bytes == 0 {
        plan.workspace_bytes = WORKSPACE_BYTES;
        outcome = multiply(plan);
    }
    outcome.map_err(|error| failed(OP, format!("{key:?}: {error:?}")))
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, key: &Key) -> Result<Plan> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let refused = |error: lt::CublasError| failed(OP, format!("{key:?}: {error:?}"));
        let [m, n, k, batch] = key.sizes;
        let (operand, result) = (data_type(key.types[0])?, data_type(key.types[1])?);
        // As stored, a row-major matrix is its transpose in columns: rows and columns change places.
        let layout =
            |rows: usize, columns: usize, transposed: bool, [row_stride, batch_stride]: [usize; 2], kind| {
                let (height, width) = if transposed { (rows, columns) } else { (columns, rows) };
                // A single row has no distance to the next; the library still wants one that is wide enough.
                let stride = row_stride.max(height);
                let layout = lt::create_matrix_layout(kind, height as u64, width as u64, stride as i64)
                    .map_err(refused)?;
                if batch > 1 {
                    use sys::cublasLtMatrixLayoutAttribute_t as Layout;
                    let (count, offset) = (batch as i32, batch_stride as i64);
                    // SAFETY: the attributes take a 32-bit count and a 64-bit offset.
                    unsafe {
                        set_layout(layout, Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)
                            .map_err(refused)?;
                        set_layout(layout, Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset)
                            .map_err(refused)?;
                    }
                }
                Ok::<_, TensorError>(layout)
            };
        let layouts = [
            layout(m, k, key.transposed[0], key.strides[0], operand)?,
            layout(k, n, key.transposed[1], key.strides[1], operand)?,
            layout(m, n, false, key.strides[2], result)?,
        ];
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = lt::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(refused)?;
        // SAFETY: an all-zero algorithm is a value the heuristic overwrites before anybody reads it.
        let algorithm = unsafe { std::mem::zeroed() };
        let mut plan = Plan { description, layouts, algorithm, workspace_bytes: 0 };
        let operation = |transposed: bool| i32::from(transposed);
        plan.describe(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(key.transposed[1]))?;
        plan.describe(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(key.transposed[0]))?;
        use sys::cublasLtEpilogue_t as Lt;
        let epilogue = if key.has_bias { Lt::CUBLASLT_EPILOGUE_BIAS } else { Lt::CUBLASLT_EPILOGUE_DEFAULT };
        plan.describe(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        let choice = choose(handle, &plan, key).map_err(refused)?;
        plan.algorithm = choice.algo;
        if choice.workspaceSize > COUNTER_BYTES {
            plan.workspace_bytes = WORKSPACE_BYTES;
        }
        Ok(plan)
    }

    fn describe<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: each attribute is given the type its documentation names, and its size.
        unsafe {
            lt::set_matmul_desc_attribute(
                self.description,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
        .map_err(|error| failed(OP, format!("{attribute:?}: {error:?}")))
    }
}

/// # Safety
/// `T` is the type that the attribute takes.
unsafe fn set_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: &T,
) -> Result<(), lt::CublasError> {
    // SAFETY: the caller's promise.
    unsafe {
        lt::set_matrix_layout_attribute(layout, attribute, std::ptr::from_ref(value).cast(), size_of::<T>())
    }
}

fn choose(
    handle: sys::cublasLtHandle_t,
    plan: &Plan,
    key: &Key,
) -> Result<sys::cublasLtMatmulHeuristicResult_t, lt::CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
    let preference = lt::create_matmul_pref()?;
    let alignment = key.alignment.map(|bytes| bytes as u32);
    // The library's A is our B.
    let wishes: [(Preference, &dyn AsBytes); 5] = [
        (Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES),
        (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &alignment[1]),
        (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment[0]),
        (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &alignment[2]),
        (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &alignment[2]),
    ];
    let outcome = (|| {
        for (attribute, value) in wishes {
            let (pointer, bytes) = value.parts();
            // SAFETY: the workspace is a size_t, alignments are 32-bit, as documented.
            unsafe { lt::set_matmul_pref_attribute(preference, attribute, pointer, bytes)? };
        }
        let [a, b, c] = plan.layouts;
        let mut count = 0;
        // SAFETY: an all-zero result is a value that the heuristic overwrites.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CHOICES] = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors were made above and live, and there is room for as many results as are asked for.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                plan.description,
                b,
                a,
                c,
                c,
                preference,
                CHOICES as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        }
        .result()?;
        let choices = &found[..usize::try_from(count).unwrap_or(0).min(CHOICES)];
        let first =
            choices.first().ok_or(lt::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED))?;
        first.state.result()?;
        let by_turns =
            choices.iter().find(|choice| choice.state.result().is_ok() && works_by_turns(&choice.algo));
        Ok(*by_turns.filter(|_| is_short(key)).unwrap_or(first))
    })();
    // SAFETY: the preference is ours and no longer used.
    unsafe { lt::destroy_matmul_pref(preference)? };
    outcome
}

/// How many choices of the heuristic are looked at.
const CHOICES: usize = 8;

/// Whether a product multiplies little for each result that it writes.
fn is_short(key: &Key) -> bool {
    let [_, n, k, _] = key.sizes;
    k <= 1024 || n >= 2 * k
}

/// Whether a kernel is one of Hopper's in which two teams take turns: one multiplies while the other writes its results
/// out. At the power limit, where a training run is, they were 3 to 14 % faster than the heuristic's first choice, and gave
/// its bits at every shape that was compared. The numbers are those of the cuBLASLt 13 that this was measured with, whose
/// documentation has none; should they mean another kernel elsewhere, it is still one that the heuristic offers.
fn works_by_turns(algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let attribute = |which| {
        let mut value = 0i32;
        // SAFETY: these attributes are 32 bits wide.
        let outcome = unsafe {
            let place = std::ptr::from_mut(&mut value).cast();
            sys::cublasLtMatmulAlgoConfigGetAttribute(algorithm, which, place, 4, std::ptr::null_mut())
        };
        outcome.result().ok().map(|()| value)
    };
    attribute(Attribute::CUBLASLT_ALGO_CONFIG_ID) == Some(66)
        && matches!(attribute(Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION), Some(1 | 2))
        && attribute(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM) == Some(1)
}

/// A value as the library's untyped attributes take it.
trait AsBytes {
    fn parts(&self) -> (*const c_void, usize);
}

impl<T: Copy> AsBytes for T {
    fn parts(&self) -> (*const c_void, usize) {
        (std::ptr::from_ref(self).cast(), size_of::<T>())
    }
}

impl Products for CudaBackend {
    fn gemm(&self, gemm: Gemm<'_>) -> Result<()> {
        product(self, &gemm)
    }

    fn joined_rows(&self) -> Option<[usize; 2]> {
        // Our own kernels take up to so many rows with weights side by side.
        let own = few_rows::most_rows(self, DType::BF16, false).max(FEW_ROWS);
        Some([own, JOINED_ROWS])
    }

    fn gemms(&self, products: Vec<Gemm<'_>>) -> Result<()> {
        gemms(self, &products)
    }
}
