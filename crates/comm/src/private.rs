//! Folders and files that no other user may read, replace or put in our way.
//!
//! The system's temporary folder belongs to everybody: at a name that can be guessed there may lie a link to a file of
//! ours, or somebody else's folder. What this crate keeps there lies in one folder per user that only its owner may
//! enter. Files are created, never opened for writing where one already is, and no link is followed. A folder that is not
//! ours alone is refused, not repaired.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// This user's folder among the temporary files, made if need be: `TMPDIR/ferrospeed-UID`. Where nobody has chosen TMPDIR and another
/// user has put something at that name, it is `/run/user/UID/ferrospeed`, where nobody else can.
pub fn folder() -> Result<PathBuf> {
    let (shared, private) = places();
    first_of_ours(shared, private)
}

/// That folder, where it is there already; none is made.
pub fn existing_folder() -> Option<PathBuf> {
    let (shared, private) = places();
    let own = private.map(|private| private.join("ferrospeed"));
    [Some(shared), own].into_iter().flatten().find(|folder| is_ours(folder))
}

/// Where it is, and beside what it is instead.
fn places() -> (PathBuf, Option<PathBuf>) {
    let own = own_user();
    let given = std::env::var_os("TMPDIR").filter(|given| !given.is_empty()).map(PathBuf::from);
    let shared = given.as_deref().unwrap_or(Path::new("/tmp")).join(format!("ferrospeed-{own}"));
    (shared, given.is_none().then(|| PathBuf::from(format!("/run/user/{own}"))))
}

/// `shared`, or a folder in `private` where `shared` is not ours and `private` is.
fn first_of_ours(shared: PathBuf, private: Option<PathBuf>) -> Result<PathBuf> {
    let refused = match make_folder(&shared) {
        Ok(()) => return Ok(shared),
        Err(refused) => refused,
    };
    let Some(private) = private.filter(|private| is_ours(private)) else { return Err(refused) };
    let path = private.join("ferrospeed");
    make_folder(&path).map(|()| path)
}

fn is_ours(folder: &Path) -> bool {
    std::fs::symlink_metadata(folder)
        .is_ok_and(|found| found.is_dir() && found.uid() == own_user() && found.mode() & 0o077 == 0)
}

/// Makes a folder that only this user may enter; one that is there already must be such a folder.
pub fn make_folder(path: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => {
            let shown = path.display();
            let why = format!("cannot make the folder {shown}: {error}; set TMPDIR to a folder of your own");
            return Err(Error::new(error.kind(), why));
        }
    }
    let found = std::fs::symlink_metadata(path)?;
    let refuse = |why: String| {
        let shown = path.display();
        let next = "remove it, or set TMPDIR to a folder of your own";
        Err(Error::new(ErrorKind::PermissionDenied, format!("{shown} {why}; {next}")))
    };
    if !found.is_dir() {
        return refuse("is not a folder".into());
    }
    if found.uid() != own_user() {
        return refuse(format!("belongs to user {}", found.uid()));
    }
    if found.mode() & 0o077 != 0 {
        return refuse(format!("may be entered by other users (its mode is {:o})", found.mode() & 0o777));
    }
    Ok(())
}

/// Creates a file that only this user may read. An error where anything lies at that name, a link included.
pub fn create_new(path: &Path) -> Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
}

/// Writes a file as a whole: it appears under its name when it is complete, in place of whatever had that name.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut suffix = [0u8; 8];
    fill_random(&mut suffix)?;
    let beside = path.with_extension(format!("{:016x}.tmp", u64::from_ne_bytes(suffix)));
    let written = create_new(&beside).and_then(|mut file| file.write_all(bytes));
    written.and_then(|()| std::fs::rename(&beside, path)).inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

/// Opens a file of this user that nobody else may read or write; no link, no pipe, no device.
pub fn open(path: &Path) -> Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    let why = if !found.is_file() {
        "is not a plain file"
    } else if found.uid() != own_user() {
        "belongs to another user"
    } else if found.mode() & 0o077 != 0 {
        "may be read or written by other users; `chmod 600` it"
    } else {
        return Ok(file);
    };
    Err(Error::new(ErrorKind::PermissionDenied, format!("{} {why}", path.display())))
}

/// Reads such a file, which holds one short line.
pub fn read_line(path: &Path) -> Result<String> {
    const MAX_BYTES: u64 = 4096;
    let mut text = String::new();
    open(path)?.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text.trim().to_owned())
}

/// Fills `bytes` from the system's source of randomness.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(Error::other)
}

/// As many random bytes, in hexadecimal digits.
pub(crate) fn random_hex<const BYTES: usize>() -> Result<String> {
    let mut bytes = [0u8; BYTES];
    fill_random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn own_user() -> u32 {
    // SAFETY: a system call without arguments that cannot fail.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = folder().unwrap().join(format!("test-{name}-{}", random_hex::<8>().unwrap()));
        std::fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn a_link_in_place_of_a_file_is_replaced_and_what_it_points_to_stays() {
        let scratch = scratch("link");
        let (precious, link) = (scratch.join("precious"), scratch.join("rank-00000.jsonl"));
        std::fs::write(&precious, "kept").unwrap();
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        assert!(create_new(&link).is_err());
        assert!(open(&link).is_err());
        write(&link, b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "kept");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_file());
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_folder_that_is_a_link_or_open_to_others_is_refused() {
        let scratch = scratch("folder");
        let (inner, link) = (scratch.join("inner"), scratch.join("link"));
        make_folder(&inner).unwrap();
        make_folder(&inner).unwrap();
        std::os::unix::fs::symlink(&inner, &link).unwrap();
        assert!(make_folder(&link).unwrap_err().to_string().contains("is not a folder"));
        std::fs::set_permissions(&inner, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert!(make_folder(&inner).unwrap_err().to_string().contains("its mode is 755"));
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn the_folder_that_is_there_is_the_one_that_is_made() {
        let made = folder().unwrap();
        assert_eq!(existing_folder(), Some(made));
        let scratch = scratch("foreign");
        std::fs::set_permissions(&scratch, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert!(!is_ours(&scratch), "others may enter it");
        assert!(!is_ours(&scratch.join("missing")));
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn what_somebody_puts_at_the_usual_name_stops_no_job_where_there_is_a_place_of_our_own() {
        let scratch = scratch("usual");
        let (usual, own) = (scratch.join("usual"), scratch.join("own"));
        std::fs::write(&usual, "in the way").unwrap();
        assert!(first_of_ours(usual.clone(), None).is_err());
        assert!(first_of_ours(usual.clone(), Some(own.clone())).is_err(), "there is none");
        make_folder(&own).unwrap();
        assert_eq!(first_of_ours(usual.clone(), Some(own.clone())).unwrap(), own.join("ferrospeed"));
        std::fs::set_permissions(&own, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert!(first_of_ours(usual, Some(own)).is_err(), "others may enter it");
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_secret_that_others_may_read_is_not_taken() {
        let scratch = scratch("secret");
        let path = scratch.join("token");
        write(&path, b"secret\n").unwrap();
        assert_eq!(read_line(&path).unwrap(), "secret");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert!(read_line(&path).unwrap_err().to_string().contains("chmod 600"));
        std::fs::remove_dir_all(scratch).unwrap();
    }
}
