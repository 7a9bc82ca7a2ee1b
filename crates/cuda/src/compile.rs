//! Kernels: CUDA C++ compiled by NVRTC for the GPU that is there, once, and kept on disk by a hash of all that goes in.
//!
//! The cache is `$FERROSPEED_KERNEL_CACHE`, else `$XDG_CACHE_HOME/ferrospeed/kernels`, else `~/.cache/ferrospeed/kernels`.
//! A cache that cannot be read or written only costs time.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;

use cudarc::driver::result as cu;
use cudarc::driver::sys::{CUfunction, CUmodule};
use cudarc::nvrtc::{result as rtc, sys as rtc_sys};
use ferrospeed_tensor::Result;

use crate::driver::{Checked, Driver, failed};
use crate::{
    attention_any, attention_backward, attention_pages, few_rows, gemm, grouped, integers, loss, packed,
    permute, some_rows, table,
};

const COMMON: &str = include_str!("kernels/common.cuh");

/// The kernel files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Attention,
    AttentionAny,
    AttentionBackward,
    AttentionEnds,
    AttentionPages,
    AttentionTiles,
    Cast,
    Elementwise,
    Embedding,
    FewRows,
    SomeRows,
    Grouped,
    GroupedProduct,
    Image,
    Integers,
    Loss,
    Move,
    Norm,
    OneBit,
    Optimizer,
    Packed,
    Permute,
    Product,
    Reduce,
    Signs,
}

impl Source {
    const fn text(self) -> (&'static str, &'static str) {
        match self {
            Source::Attention => (
                "attention.cu",
                concat!(include_str!("kernels/attention_spec.cuh"), include_str!("kernels/attention.cu")),
            ),
            Source::AttentionAny => (
                "attention_any.cu",
                concat!(include_str!("kernels/attention_spec.cuh"), include_str!("kernels/attention_any.cu")),
            ),
            Source::AttentionBackward => {
                ("attention_backward.cu", include_str!("kernels/attention_backward.cu"))
            }
            Source::AttentionEnds => ("attention_ends.cu", include_str!("kernels/attention_ends.cu")),
            Source::AttentionPages => ("attention_pages.cu", include_str!("kernels/attention_pages.cu")),
            Source::AttentionTiles => ("attention_tiles.cu", include_str!("kernels/attention_tiles.cu")),
            Source::Cast => ("cast.cu", include_str!("kernels/cast.cu")),
            Source::Elementwise => ("elementwise.cu", include_str!("kernels/elementwise.cu")),
            Source::Embedding => ("embedding.cu", include_str!("kernels/embedding.cu")),
            Source::SomeRows => ("some_rows.cu", include_str!("kernels/some_rows.cu")),
            Source::FewRows => ("few_rows.cu", include_str!("kernels/few_rows.cu")),
            Source::Grouped => ("grouped.cu", include_str!("kernels/grouped.cu")),
            Source::GroupedProduct => ("grouped_product.cu", include_str!("kernels/grouped_product.cu")),
            Source::Image => ("image.cu", include_str!("kernels/image.cu")),
            Source::Integers => ("integers.cu", include_str!("kernels/integers.cu")),
            Source::Loss => ("loss.cu", include_str!("kernels/loss.cu")),
            Source::Move => ("move.cu", include_str!("kernels/move.cu")),
            Source::Norm => ("norm.cu", include_str!("kernels/norm.cu")),
            Source::OneBit => ("one_bit.cu", include_str!("kernels/one_bit.cu")),
            Source::Optimizer => ("optimizer.cu", include_str!("kernels/optimizer.cu")),
            Source::Packed => ("packed.cu", include_str!("kernels/packed.cu")),
            Source::Permute => ("permute.cu", include_str!("kernels/permute.cu")),
            Source::Product => ("product.cu", include_str!("kernels/product.cu")),
            Source::Reduce => ("reduce.cu", include_str!("kernels/reduce.cu")),
            Source::Signs => ("signs.cu", include_str!("kernels/signs.cu")),
        }
    }
}

/// Numbers that a kernel file and what launches its kernels have in common: macros by their names.
pub(crate) type Shared = &'static [(&'static str, usize)];

impl Source {
    const fn shared(self) -> Shared {
        match self {
            Source::AttentionAny => attention_any::SHARED,
            Source::AttentionBackward | Source::AttentionEnds => attention_backward::SHARED,
            Source::AttentionPages => attention_pages::SHARED,
            Source::FewRows => few_rows::SHARED,
            Source::SomeRows => some_rows::SHARED,
            Source::Grouped => grouped::SHARED,
            Source::GroupedProduct => grouped::SHARED_PRODUCT,
            Source::Integers => integers::SHARED,
            Source::Loss => loss::SHARED,
            Source::OneBit | Source::Optimizer | Source::Signs => table::SHARED,
            Source::Packed => packed::SHARED,
            Source::Permute => permute::SHARED,
            Source::Product => gemm::SHARED,
            Source::Attention
            | Source::AttentionTiles
            | Source::Cast
            | Source::Elementwise
            | Source::Embedding
            | Source::Image
            | Source::Move
            | Source::Norm
            | Source::Reduce => &[],
        }
    }
}

/// A kernel: its file, what the file is compiled with, and its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub(crate) source: Source,
    /// Macros, such as `REAL=bf16`; empty ones are left out.
    pub(crate) defines: [&'static str; 3],
    pub(crate) name: &'static str,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<(Source, [&'static str; 3]), usize>,
    functions: HashMap<Kernel, usize>,
}

/// All kernels of one device, compiled when they are first used.
pub(crate) struct Kernels {
    loaded: Mutex<Loaded>,
    cache: Option<PathBuf>,
}

impl Kernels {
    pub(crate) fn new() -> Kernels {
        Kernels { loaded: Mutex::default(), cache: cache_folder() }
    }

    /// The compiled kernel.
    pub(crate) fn get(&self, driver: &Driver, kernel: Kernel) -> Result<CUfunction> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(&function) = loaded.functions.get(&kernel) {
            return Ok(function as CUfunction);
        }
        let key = (kernel.source, kernel.defines);
        let module = match loaded.modules.get(&key) {
            Some(&module) => module as CUmodule,
            None => {
                let image = self.image(driver, kernel.source, kernel.defines)?;
                // SAFETY: the image is a whole module made for this device: compiled just now, or by an equal hash.
                let module =
                    unsafe { cu::module::load_data(image.as_ptr().cast()) }.during("load a kernel")?;
                loaded.modules.insert(key, module as usize);
                module
            }
        };
        let name = CString::new(kernel.name).expect("kernel names have no zero byte");
        // SAFETY: the module was loaded above and is never unloaded.
        let function = unsafe { cu::module::get_function(module, name) }.during("find a kernel")?;
        loaded.functions.insert(kernel, function as usize);
        Ok(function)
    }

    /// The machine code, from the cache where it is there.
    fn image(&self, driver: &Driver, source: Source, defines: [&'static str; 3]) -> Result<Vec<u8>> {
        let (name, text) = source.text();
        // Hopper's own instructions are only compiled for that chip and no other.
        let suffix = if driver.capability == (9, 0) { "a" } else { "" };
        let target = format!("sm_{}{}{suffix}", driver.capability.0, driver.capability.1);
        let mut options = vec![
            format!("--gpu-architecture={target}"),
            "--std=c++17".to_owned(),
            "-default-device".to_owned(),
        ];
        options
            .extend(defines.iter().filter(|define| !define.is_empty()).map(|define| format!("-D{define}")));
        options.extend(source.shared().iter().map(|(name, value)| format!("-D{name}={value}")));
        let path = self.cache.as_ref().map(|folder| {
            let mut hasher = DefaultHasher::new();
            (COMMON, text, &options, env!("CARGO_PKG_VERSION"), compiler_version()).hash(&mut hasher);
            folder.join(format!("{}-{target}-{:016x}.cubin", name.trim_end_matches(".cu"), hasher.finish()))
        });
        if let Some(image) = path.as_ref().and_then(|path| std::fs::read(path).ok()).filter(|i| is_whole(i)) {
            return Ok(image);
        }
        let image = compile(name, &format!("{COMMON}\n{text}"), &options)?;
        if let Some(path) = path {
            keep(&path, &image);
        }
        Ok(image)
    }
}

fn cache_folder() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("FERROSPEED_KERNEL_CACHE")
        .or_else(|| named("XDG_CACHE_HOME").map(|folder| folder.join("ferrospeed/kernels")))
        .or_else(|| named("HOME").map(|folder| folder.join(".cache/ferrospeed/kernels")))
}

/// Whether a cached file is an object file at all; the driver checks the rest.
fn is_whole(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF") && image.len() > 64
}

/// Writes beside and renames, so that another process never reads half a file.
fn keep(path: &std::path::Path, image: &[u8]) {
    let Some(folder) = path.parent() else { return };
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    // A file or link that somebody put there is not written to.
    let create = || std::fs::OpenOptions::new().write(true).create_new(true).open(&beside);
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| create()?.write_all(image))
        .and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
}

fn compiler_version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both places are valid for writes.
    unsafe { rtc_sys::nvrtcVersion(&mut major, &mut minor) };
    (major, minor)
}

fn compile(name: &str, text: &str, options: &[String]) -> Result<Vec<u8>> {
    const OP: &str = "compile a kernel";
    let text = CString::new(text).expect("kernel files have no zero byte");
    let file = CString::new(name).expect("file names have no zero byte");
    let program =
        rtc::create_program(&text, Some(&file)).map_err(|error| failed(OP, format!("{name}: {error:?}")))?;
    // SAFETY: the program was just made; it is destroyed below, after its last use.
    let result = unsafe { rtc::compile_program(program, options) };
    let outcome = match result {
        // SAFETY: as above.
        Err(error) => unsafe {
            let log = rtc::get_program_log(program).unwrap_or_default();
            let log: String = log.iter().take_while(|&&c| c != 0).map(|&c| char::from(c as u8)).collect();
            Err(failed(OP, format!("{name} with {options:?}: {error:?}\n{log}")))
        },
        // SAFETY: as above; the buffer has the size the compiler asked for.
        Ok(()) => unsafe {
            let mut size = 0usize;
            rtc_sys::nvrtcGetCUBINSize(program, &mut size);
            let mut image = vec![0u8; size];
            rtc_sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast::<c_char>());
            if is_whole(&image) {
                Ok(image)
            } else {
                Err(failed(OP, format!("{name}: no machine code came out")))
            }
        },
    };
    // SAFETY: nobody uses the program any more.
    let _ = unsafe { rtc::destroy_program(program) };
    outcome
}
