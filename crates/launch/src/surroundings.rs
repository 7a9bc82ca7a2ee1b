//! The real world behind [`crate::plan::Surroundings`]: files, ssh, devices, ports.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::LaunchError;
use crate::exports::{ENV_FILE_NAME, ENV_FILE_VARIABLE, Environment};
use crate::hostfile;
use crate::options::Backend;
use crate::plan::Surroundings;

/// An environment has a few kilobytes.
const MAX_ENV_FILE_BYTES: u64 = 4 << 20;

/// This host, and the other hosts over ssh.
#[derive(Debug, Clone)]
pub struct ThisHost {
    job_token: String,
    job_id: String,
    contact: Contact,
}

/// Whether other hosts and backends may be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contact {
    /// A real launch.
    Allowed,
    /// A dry run: no ssh, every backend counts as installed, a host's name stands for its address.
    Never,
}

impl ThisHost {
    /// Looks at this host, with a new job token.
    pub fn new(contact: Contact) -> Result<Self, LaunchError> {
        let (job_token, job_id) = match contact {
            Contact::Allowed => (new_job_token()?, new_job_token()?),
            // What a dry run prints may end up anywhere: it holds no secret.
            Contact::Never => ("TOKEN".to_owned(), "JOB".to_owned()),
        };
        Ok(ThisHost { job_token, job_id, contact })
    }
}

/// A random token that no other job has.
pub fn new_job_token() -> Result<String, LaunchError> {
    use std::io::Read;
    let system = |source| LaunchError::System { action: "read random bytes from /dev/urandom", source };
    let mut bytes = [0u8; 16];
    std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).map_err(system)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A TCP port that is free on this host now.
pub fn free_port() -> Result<u16, LaunchError> {
    let system = |source| LaunchError::System { action: "find a free port", source };
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(system)?;
    Ok(listener.local_addr().map_err(system)?.port())
}

/// The environment of this process. Variables that are not text are left to plain inheritance.
pub fn environment() -> Environment {
    let text = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    text.collect()
}

/// This host's name.
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "localhost".to_owned())
}

/// The Python interpreter that scripts run with.
pub fn python() -> String {
    std::env::var("PYTHON").ok().filter(|path| !path.is_empty()).unwrap_or_else(|| "python3".to_owned())
}

/// Whether a program lies in `PATH`.
pub fn in_path(program: &str) -> bool {
    use std::os::unix::fs::PermissionsExt;
    let is_executable = |path: &Path| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| is_executable(&folder.join(program)))
}

impl Surroundings for ThisHost {
    fn hostfile(&self, path: &str) -> Result<Option<String>, LaunchError> {
        hostfile::read_text(Path::new(path))
    }

    fn environment(&self) -> Environment {
        environment()
    }

    fn device_count(&self) -> u32 {
        let listed = std::fs::read_dir("/proc/driver/nvidia/gpus");
        listed.map_or(0, |entries| entries.flatten().count() as u32)
    }

    fn current_dir(&self) -> Result<String, LaunchError> {
        let folder = std::env::current_dir()
            .map_err(|source| LaunchError::System { action: "find the current folder", source })?;
        folder.into_os_string().into_string().map_err(|path| {
            LaunchError::Usage(format!("the current folder {} has a name that is not UTF-8", path.display()))
        })
    }

    fn env_files(&self) -> Result<Vec<(String, String)>, LaunchError> {
        let name = std::env::var(ENV_FILE_VARIABLE).unwrap_or_else(|_| ENV_FILE_NAME.to_owned());
        let home = std::env::var("HOME").ok().map(|home| Path::new(&home).join(&name));
        let mut found = Vec::new();
        for path in home.into_iter().chain([Path::new(".").join(&name)]) {
            match ferrospeed_files::read_text(&path, MAX_ENV_FILE_BYTES) {
                Ok(text) => found.push((path.display().to_string(), text)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(LaunchError::File { action: "read environment file", path, source });
                }
            }
        }
        Ok(found)
    }

    fn named_env_file(&self, path: &str) -> Result<String, LaunchError> {
        let refuse =
            |source| LaunchError::File { action: "read environment file", path: path.into(), source };
        ferrospeed_files::read_text(path, MAX_ENV_FILE_BYTES).map_err(refuse)
    }

    fn is_this_host(&self, host: &str) -> bool {
        let own = host_name();
        let short = own.split('.').next().unwrap_or_default();
        ["localhost", "127.0.0.1", "::1", &own, short].contains(&host)
    }

    fn check_ssh(&self, host: &str, port: Option<u16>) -> Result<(), LaunchError> {
        match self.contact {
            Contact::Never => Ok(()),
            Contact::Allowed => ssh(host, port, &["-o", "PasswordAuthentication=no"], "hostname").map(drop),
        }
    }

    fn address_of(&self, host: &str, port: Option<u16>) -> Result<String, LaunchError> {
        if self.contact == Contact::Never {
            return Ok(host.to_owned());
        }
        let addresses = match self.is_this_host(host) {
            true => answer(host, Command::new("hostname").arg("-I"))?,
            false => ssh(host, port, &[], "hostname -I")?,
        };
        let reason = || "`hostname -I` gave no address; name one with --master_addr".to_owned();
        let first = addresses.split_whitespace().next().map(str::to_owned);
        first.ok_or_else(|| LaunchError::SshFailed { host: host.to_owned(), reason: reason() })
    }

    fn backend_installed(&self, backend: Backend) -> bool {
        if self.contact == Contact::Never {
            return true;
        }
        if backend != Backend::Mvapich {
            return in_path(backend.probe_program());
        }
        let version = Command::new(backend.probe_program()).stderr(Stdio::null()).output();
        version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("MVAPICH2-GDR"))
    }

    fn free_port(&self) -> Result<u16, LaunchError> {
        free_port()
    }

    fn process_id(&self) -> u32 {
        std::process::id()
    }

    fn executable(&self) -> Result<String, LaunchError> {
        let system = |source| LaunchError::System { action: "find the path of this executable", source };
        Ok(std::env::current_exe().map_err(system)?.display().to_string())
    }

    fn python(&self) -> String {
        python()
    }

    fn scratch_file(&self, name: &str) -> String {
        let file = format!("ferrospeed-{}-{name}", std::process::id());
        std::env::temp_dir().join(file).display().to_string()
    }

    fn job_token(&self) -> String {
        self.job_token.clone()
    }

    fn job_id(&self) -> String {
        self.job_id.clone()
    }
}

fn ssh(host: &str, port: Option<u16>, options: &[&str], command: &str) -> Result<String, LaunchError> {
    let mut ssh = Command::new("ssh");
    ssh.args(["-o", "ConnectTimeout=15"]).args(options);
    if let Some(port) = port {
        ssh.args(["-p", &port.to_string()]);
    }
    answer(host, ssh.arg(host).arg(command))
}

fn answer(host: &str, command: &mut Command) -> Result<String, LaunchError> {
    let refuse = |reason: String| LaunchError::SshFailed { host: host.to_owned(), reason };
    let output = command.stdin(Stdio::null()).output().map_err(|error| refuse(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or("it said nothing");
    Err(refuse(format!("{} ({})", last.trim(), output.status)))
}
