//! Many clients from many addresses of loopback: what a flood is made of. Knows nothing of what they say.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

/// Lets this process hold as many connections as the system allows.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).expect("a soft limit may be raised to the hard one");
}

/// The address of client number `n`: one in 127.0.0.0/8 that is not 127.0.0.1.
pub fn address(n: usize) -> Ipv4Addr {
    let [_, b, c, d] = u32::try_from(n + 256).expect("few clients").to_be_bytes();
    Ipv4Addr::new(127, b, c, d)
}

/// A connection from `source` to `to`.
pub fn connect_from(source: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let source = SocketAddr::from((source, 0));
    socket.bind(&source.into()).expect("an address of loopback");
    socket.connect(&to.into()).expect("the proxy accepts");
    let stream = TcpStream::from(socket);
    stream
        .set_read_timeout(Some(Duration::from_secs(40)))
        .expect("a time-out that is not zero");
    stream
}

/// Says something.
pub fn say(mut stream: &TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).expect("the proxy reads");
}

/// All that the proxy answers until it closes.
pub fn hear_all(mut stream: &TcpStream) -> String {
    let mut heard = Vec::new();
    // A reset ends it as well as a close; what came before it counts.
    let _ = stream.read_to_end(&mut heard);
    String::from_utf8_lossy(&heard).into_owned()
}
