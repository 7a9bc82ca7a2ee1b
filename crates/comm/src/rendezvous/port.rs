//! Where the hub listens, and how members on the same host find it when its port was taken.
//!
//! On a single host the hub also answers at an abstract Unix address made of the job's token and the wanted port: it
//! tells the port that it really got. Two jobs with different tokens may thus name the same `MASTER_PORT`.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::ConnectOptions;
use crate::error::{Error, Result};

/// Binds the hub's socket: to loopback when all ranks are on this host.
pub(super) fn bind(options: &ConnectOptions) -> Result<TcpListener> {
    let wanted = options.master_port;
    let taken = |error: std::io::Error, address: SocketAddr| {
        if error.kind() == ErrorKind::AddrInUse {
            let holder = holder_of(address.port()).map_or_else(String::new, |holder| format!(" by {holder}"));
            return Error::rendezvous(format!(
                "port {} is taken{holder}; set MASTER_PORT to a free one",
                address.port()
            ));
        }
        Error::io(format!("listening at {address}"), error)
    };
    if options.is_single_host() {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), wanted);
        return TcpListener::bind(address).or_else(|error| {
            if error.kind() != ErrorKind::AddrInUse {
                return Err(taken(error, address));
            }
            let holder = holder_of(wanted).unwrap_or_else(|| "an unknown process".into());
            tracing::info!("port {wanted} is taken by {holder}; taking another");
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| taken(error, address))
        });
    }
    let address = resolve(options)?;
    TcpListener::bind(address)
        .or_else(|error| match error.kind() {
            // The master's name may stand for an address that is translated on the way.
            ErrorKind::AddrNotAvailable => TcpListener::bind((Ipv4Addr::UNSPECIFIED, wanted)),
            _ => Err(error),
        })
        .map_err(|error| taken(error, address))
}

/// The address of `MASTER_ADDR:MASTER_PORT`.
pub(super) fn resolve(options: &ConnectOptions) -> Result<SocketAddr> {
    let what = || format!("resolving MASTER_ADDR {:?}", options.master_addr);
    let mut found = (options.master_addr.as_str(), options.master_port)
        .to_socket_addrs()
        .map_err(|error| Error::io(what(), error))?;
    found.next().ok_or_else(|| Error::rendezvous(format!("{}: no address", what())))
}

fn unix_address(options: &ConnectOptions) -> std::io::Result<UnixAddress> {
    UnixAddress::from_abstract_name(format!("ferrospeed-{:016x}", options.job_digest()))
}

/// Answers members of this host that ask for the hub's port.
pub(super) struct PortService {
    address: UnixAddress,
}

impl PortService {
    /// Starts answering, until `closed` is set and [`PortService::wake`] is called.
    pub(super) fn start(options: &ConnectOptions, port: u16, closed: Arc<AtomicBool>) -> Result<PortService> {
        let failed = |error: std::io::Error| {
            if error.kind() == ErrorKind::AddrInUse {
                let problem = format!(
                    "another job with the same token meets at port {} of this host; \
                     set MASTER_PORT or FERROSPEED_JOB_TOKEN",
                    options.master_port
                );
                return Error::rendezvous(problem);
            }
            Error::io("announcing the rendezvous port", error)
        };
        let address = unix_address(options).map_err(failed)?;
        let listener = UnixListener::bind_addr(&address).map_err(failed)?;
        let answer = move || {
            for stream in listener.incoming() {
                if closed.load(Ordering::SeqCst) {
                    return;
                }
                // A member that hung up will ask again.
                let _ = stream.and_then(|mut stream| stream.write_all(port.to_string().as_bytes()));
            }
        };
        let spawned = std::thread::Builder::new().name("comm-port".into()).spawn(answer);
        spawned.map_err(|error| Error::io("starting the rendezvous", error))?;
        Ok(PortService { address })
    }

    /// Lets the service see that it is closed.
    pub(super) fn wake(&self) {
        let _ = UnixStream::connect_addr(&self.address);
    }
}

/// The hub's address, for a member on the same host; `None` while the hub is not there yet.
pub(super) fn ask_port(options: &ConnectOptions) -> Option<SocketAddr> {
    let mut stream = UnixStream::connect_addr(&unix_address(options).ok()?).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), text.parse().ok()?))
}

/// The process that listens at a port, where `/proc` lets us see it.
pub(super) fn holder_of(port: u16) -> Option<String> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let listening = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = fields.get(1)?.rsplit(':').next()?;
        let matches = u16::from_str_radix(local, 16).ok()? == port && *fields.get(3)? == "0A";
        matches.then(|| fields.get(9).map(|inode| format!("socket:[{inode}]"))).flatten()
    };
    let socket = tables.iter().flat_map(|table| table.lines().skip(1)).find_map(listening)?;
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let holds = |path: std::path::PathBuf| {
            std::fs::read_link(path).is_ok_and(|target| target.as_os_str() == socket.as_str())
        };
        if descriptors.flatten().any(|descriptor| holds(descriptor.path())) {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("process {pid} ({})", name.trim()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_port_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let holder = holder_of(listener.local_addr().unwrap().port()).unwrap();
        assert!(holder.contains(&std::process::id().to_string()), "{holder}");
    }

    #[test]
    fn a_taken_port_is_replaced_on_one_host_and_refused_with_its_holder_on_many() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let mut options = ConnectOptions::new(0, 2, "127.0.0.1", port);
        assert_ne!(bind(&options).unwrap().local_addr().unwrap().port(), port);
        options.master_addr = "0.0.0.0".into();
        let text = bind(&options).unwrap_err().to_string();
        assert!(
            text.contains("is taken by process") && text.contains(&std::process::id().to_string()),
            "{text}"
        );
    }
}
