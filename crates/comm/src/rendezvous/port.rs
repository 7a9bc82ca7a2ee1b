//! Where the hub listens, and who holds the port when it is taken.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};

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
