//! Shared libraries of accelerators and MPI, opened as a running job would open them.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// An open shared library.
struct Library(*mut c_void);

impl Library {
    fn open(name: &str) -> Result<Self, String> {
        let c_name = CString::new(name).map_err(|_| format!("{name:?} is not a file name"))?;
        // SAFETY: `c_name` is a valid C string through the call; the library's initialisers are those of a
        // system library that a job would load too.
        let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(Library(handle));
        }
        // SAFETY: dlerror gives null or a C string that lives until the next dl call of this thread.
        let message = unsafe {
            let text: *mut c_char = libc::dlerror();
            if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
        };
        Err(message.unwrap_or_else(|| "the loader gave no reason".to_owned()))
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open and `name` is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }

    /// Calls a C function that writes one integer and returns a status.
    fn read_integer(&self, name: &CStr) -> Result<c_int, String> {
        let shown = name.to_string_lossy();
        let symbol = self.symbol(name).ok_or_else(|| format!("it has no function {shown}"))?;
        // SAFETY: every function asked for here has the C signature `int f(int *)` in its vendor's header.
        let function: extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(symbol) };
        let mut value = 0;
        match function(&mut value) {
            0 => Ok(value),
            status => Err(format!("{shown} gave status {status}")),
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle is open and nothing obtained from it is kept.
        unsafe { libc::dlclose(self.0) };
    }
}

/// The first of `names` that loads, or why the first does not.
pub fn open_library(names: &[&str]) -> Result<String, String> {
    let mut first_reason = None;
    for name in names {
        match Library::open(name) {
            Ok(_) => return Ok((*name).to_owned()),
            Err(reason) => _ = first_reason.get_or_insert(reason),
        }
    }
    Err(first_reason.unwrap_or_else(|| "no name was given".to_owned()))
}

/// The CUDA driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaDriver {
    /// The CUDA version it supports, major and minor.
    pub version: (i32, i32),
    /// How many devices it shows.
    pub devices: i32,
    /// The memory of the smallest of them.
    pub device_bytes: Option<u64>,
}

/// Opens the CUDA driver and counts its devices.
pub fn cuda_driver() -> Result<CudaDriver, String> {
    let library = Library::open("libcuda.so.1")?;
    let version = library.read_integer(c"cuDriverGetVersion")?;
    let symbol = library.symbol(c"cuInit").ok_or("it has no function cuInit")?;
    // SAFETY: cuInit has the C signature `CUresult cuInit(unsigned int)` in cuda.h.
    let init: extern "C" fn(u32) -> c_int = unsafe { std::mem::transmute(symbol) };
    let devices = match init(0) {
        0 => library.read_integer(c"cuDeviceGetCount")?,
        // CUDA_ERROR_NO_DEVICE
        100 => 0,
        status => return Err(format!("cuInit gave status {status}")),
    };
    let device_bytes = (0..devices).map(|device| total_memory(&library, device)).min().flatten();
    // The driver keeps threads of its own: unloading it under them is not safe.
    std::mem::forget(library);
    Ok(CudaDriver { version: (version / 1000, version % 1000 / 10), devices, device_bytes })
}

fn total_memory(library: &Library, device: c_int) -> Option<u64> {
    let symbol = library.symbol(c"cuDeviceTotalMem_v2")?;
    // SAFETY: it has the C signature `CUresult cuDeviceTotalMem_v2(size_t *, CUdevice)` in cuda.h, and a CUdevice
    // is the int ordinal that cuDeviceGet gives for the same ordinal.
    let ask: extern "C" fn(*mut usize, c_int) -> c_int = unsafe { std::mem::transmute(symbol) };
    let mut bytes = 0;
    (ask(&mut bytes, device) == 0).then_some(bytes as u64)
}

/// Opens NCCL and asks its version.
pub fn nccl_version() -> Result<String, String> {
    let code = Library::open("libnccl.so.2")?.read_integer(c"ncclGetVersion")?;
    // Before 2.9 the code had one digit less for the minor version.
    let (major, rest) =
        if code < 10_000 { (code / 1000, code % 1000) } else { (code / 10_000, code % 10_000) };
    Ok(format!("{major}.{}.{}", rest / 100, rest % 100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_there_opens_and_one_that_is_not_says_why() {
        assert_eq!(open_library(&["libc.so.6"]).as_deref(), Ok("libc.so.6"));
        let reason = open_library(&["libdoes-not-exist.so.9"]).unwrap_err();
        assert!(reason.contains("libdoes-not-exist.so.9"), "{reason}");
        assert!(open_library(&["bad\0name"]).is_err());
    }
}
